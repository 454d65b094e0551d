import jakarta.jms.*;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

/** Time to live, delivery delay, asynchronous sends, producers without a destination. */
final class Delivery extends Suite {
    static final long DELAY_MS = 700;
    /** The client delivers expired messages to the application, so the broker must withhold them. */
    static final String NO_LOCAL_EXPIRY = "jms.localMessageExpiry=false";

    Delivery() {
        expiring();
        delaying();
        delayingTopics();
        asynchronously();
        anonymously();
        producing();
    }

    void expiring() {
        it("expiry.expired-is-not-delivered", c -> {
            send(c, c.queue(), "short", 1);
            c.send(c.queue(), "kept");
            pause(20);
            Case.getsJust(c.connect(NO_LOCAL_EXPIRY).createSession().createConsumer(c.queue()), "kept");
        });
        it("expiry.before-its-time-it-is-delivered", c -> {
            send(c, c.queue(), "long", 60_000);
            Case.getsJust(c.connect(NO_LOCAL_EXPIRY).createSession().createConsumer(c.queue()), "long");
        });
        it("expiry.of-a-durable-subscription", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createDurableConsumer(c.topic(), "s").close();
            send(c, c.topic(), "short", 1);
            c.send(c.topic(), "kept");
            pause(20);
            Case.getsJust(session.createDurableConsumer(c.topic(), "s"), "kept");
        });
        it("expiry.goes-to-the-expiry-queue", c -> {
            Message expired = expired(c);
            Check.equal("short", Case.textOf(expired));
            Check.equal("t", expired.getJMSType());
        });
        it("expiry.says-from-where", c -> {
            Message expired = expired(c);
            Check.equal(c.name, Case.annotation(expired, "x-opt-ORIG-ADDRESS"));
            Check.equal(c.name, Case.annotation(expired, "x-opt-ORIG-QUEUE"));
        });
        it("expiry.expired-ones-do-not-expire-again", c -> Check.equal(0L, expired(c).getJMSExpiration()));
        it("expiry.browsers-do-not-show-expired-ones", c -> {
            send(c, c.queue(), "short", 1);
            c.send(c.queue(), "kept");
            pause(20);
            Check.equal(List.of("kept"), Browsers.browse(c.connect(NO_LOCAL_EXPIRY).createSession().createBrowser(c.queue())));
        });
        it("expiry.while-prefetched-is-not-given-to-the-application", c -> {
            Connection connection = c.keep(c.factory().createConnection());
            MessageConsumer consumer = connection.createSession().createConsumer(c.queue());
            send(c, c.queue(), "short", 50);
            pause(80);
            connection.start();
            Case.nothing(consumer);
        });
        it("expiry.counts-from-the-send-and-not-from-the-commit", c -> {
            Session session = c.session(Session.SESSION_TRANSACTED);
            MessageProducer producer = session.createProducer(c.queue());
            producer.setTimeToLive(30);
            producer.send(session.createTextMessage("short"));
            pause(50);
            session.commit();
            Case.nothing(c.connect(NO_LOCAL_EXPIRY).createSession().createConsumer(c.queue()));
        });
        it("expiry.time-to-live-of-the-producer", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.setTimeToLive(60_000);
            Check.equal(60_000L, producer.getTimeToLive());
            producer.send(c.text("x"));
            Message got = Case.one(c.session().createConsumer(c.queue()));
            Check.equal(got.getJMSTimestamp() + 60_000, got.getJMSExpiration());
        });
        it("expiry.a-sweep-finds-those-that-nobody-receives", c -> {
            // Nobody consumes from the queue; the message moves to the expiry queue all the same.
            TextMessage message = marked(c);
            c.tools().createProducer(c.queue()).send(message, DeliveryMode.PERSISTENT, 4, 1);
            Check.equal("short", Case.textOf(fromExpiryQueue(c)));
        });
    }

    static TextMessage marked(Case c) throws JMSException {
        TextMessage message = c.text("short");
        message.setStringProperty("conformance", c.name);
        message.setJMSType("t");
        return message;
    }

    static Message expired(Case c) throws Exception {
        c.tools().createProducer(c.queue()).send(marked(c), DeliveryMode.PERSISTENT, 4, 1);
        pause(20);
        Case.nothing(c.connect(NO_LOCAL_EXPIRY).createSession().createConsumer(c.queue()));
        return fromExpiryQueue(c);
    }

    static Message fromExpiryQueue(Case c) throws JMSException {
        return Case.one(c.session().createConsumer(c.tools().createQueue("ExpiryQueue"), "conformance = '" + c.name + "'"));
    }

    static void send(Case c, Destination to, String body, long timeToLiveMs) throws JMSException {
        try (MessageProducer producer = c.tools().createProducer(to)) {
            producer.send(c.text(body), DeliveryMode.PERSISTENT, 4, timeToLiveMs);
        }
    }

    /** Time must pass: these cases are about time. */
    static void pause(long ms) throws InterruptedException {
        Thread.sleep(ms);
    }

    void delaying() {
        it("delay.not-before-its-time", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            comesInTime(consumer, "x", delayed(c, c.tools(), c.queue(), "x", DELAY_MS));
        });
        it("delay.not-visible-to-browsers", c -> {
            long sent = delayed(c, c.tools(), c.queue(), "x", DELAY_MS);
            List<String> seen = Browsers.browse(c.session().createBrowser(c.queue()));
            Check.that(seen.isEmpty() || isTime(sent), "it was visible before its time");
            Case.until("the message to be visible", () -> Browsers.browse(c.session().createBrowser(c.queue())).equals(List.of("x")));
        });
        it("delay.delivery-time-is-told-to-sender-and-receiver", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.setDeliveryDelay(DELAY_MS);
            Check.equal(DELAY_MS, producer.getDeliveryDelay());
            Message message = c.text("x");
            producer.send(message);
            Message got = Case.one(c.session().createConsumer(c.queue()));
            Check.equal(message.getJMSDeliveryTime(), got.getJMSDeliveryTime());
            Check.equal(got.getJMSTimestamp() + DELAY_MS, got.getJMSDeliveryTime());
        });
        it("delay.shorter-ones-overtake", c -> {
            delayed(c, c.tools(), c.queue(), "late", 10 * DELAY_MS); // by more than the sends between them take on any machine
            c.send(c.queue(), "at once");
            delayed(c, c.tools(), c.queue(), "early", DELAY_MS);
            Case.getsJust(c.session().createConsumer(c.queue()), "at once", "early", "late");
        });
        it("delay.transacted-counts-from-the-send", c -> {
            Session session = c.session(Session.SESSION_TRANSACTED);
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            delayed(c, session, c.queue(), "x", 100);
            pause(150);
            session.commit();
            Case.gets(consumer, "x");
        });
        it("delay.transacted-not-before-its-time", c -> {
            Session session = c.session(Session.SESSION_TRANSACTED);
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            long sent = delayed(c, session, c.queue(), "x", DELAY_MS);
            session.commit();
            comesInTime(consumer, "x", sent);
        });
        it("delay.rolled-back-never-comes", c -> {
            Session session = c.session(Session.SESSION_TRANSACTED);
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            delayed(c, session, c.queue(), "x", 50);
            session.rollback();
            Check.none(consumer.receive(150));
        });
        it("delay.non-persistent", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.setDeliveryMode(DeliveryMode.NON_PERSISTENT);
            producer.setDeliveryDelay(DELAY_MS);
            long before = System.currentTimeMillis();
            producer.send(c.text("x"));
            comesInTime(consumer, "x", before);
        });
        it("delay.none-is-at-once", c -> {
            delayed(c, c.tools(), c.queue(), "x", 0);
            Case.getsJust(c.session().createConsumer(c.queue()), "x");
        });
        it("delay.with-a-selector", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.queue(), "n = 1");
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.setDeliveryDelay(DELAY_MS);
            long before = System.currentTimeMillis();
            for (int i = 0; i < 3; i++) {
                TextMessage message = c.text("" + i);
                message.setIntProperty("n", i);
                producer.send(message);
            }
            comesInTime(consumer, "1", before);
        });
        it("delay.longer-than-the-time-to-live-expires", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.setDeliveryDelay(150);
            producer.send(c.text("x"), DeliveryMode.PERSISTENT, 4, 50);
            Check.none(c.connect(NO_LOCAL_EXPIRY).createSession().createConsumer(c.queue()).receive(400));
        });
        it("delay.anonymous-producer", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            MessageProducer producer = c.tools().createProducer(null);
            producer.setDeliveryDelay(DELAY_MS);
            long before = System.currentTimeMillis();
            producer.send(c.queue(), c.text("x"));
            comesInTime(consumer, "x", before);
        });
    }

    static long delayed(Case c, Session session, Destination to, String body, long delayMs) throws JMSException {
        try (MessageProducer producer = session.createProducer(to)) {
            producer.setDeliveryDelay(delayMs);
            long before = System.currentTimeMillis();
            producer.send(session.createTextMessage(body));
            return before;
        }
    }

    /** However long the request takes, a message that is there has waited for its delay. */
    static void comesInTime(MessageConsumer consumer, String body, long sentMs) throws JMSException {
        Message message = consumer.receiveNoWait();
        if (message == null) message = Case.one(consumer);
        Check.that(isTime(sentMs), "it came before its time");
        Check.equal(body, Case.textOf(message));
    }

    static boolean isTime(long sentMs) {
        return System.currentTimeMillis() - sentMs >= DELAY_MS;
    }

    void delayingTopics() {
        it("delay.of-a-topic", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.topic());
            comesInTime(consumer, "x", delayed(c, c.tools(), c.topic(), "x", DELAY_MS));
        });
        it("delay.of-a-topic-goes-to-subscriptions-of-the-time-of-the-send", c -> {
            MessageConsumer before = c.session().createConsumer(c.topic());
            delayed(c, c.tools(), c.topic(), "x", DELAY_MS);
            MessageConsumer after = c.session().createConsumer(c.topic());
            Case.gets(before, "x");
            Case.nothing(after);
        });
        it("delay.of-a-durable-subscription", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createDurableConsumer(c.topic(), "s").close();
            long sent = delayed(c, c.tools(), c.topic(), "x", DELAY_MS);
            comesInTime(session.createDurableConsumer(c.topic(), "s"), "x", sent);
        });
    }

    /** Records completed sends in order; an exception is recorded as null. */
    record Completions(List<Message> completed) implements CompletionListener {
        @Override
        public void onCompletion(Message message) {
            completed.add(message);
        }

        @Override
        public void onException(Message message, Exception error) {
            completed.add(null);
        }
    }

    void asynchronously() {
        it("async.completion-for-each-in-order", c -> {
            List<Message> completed = Collections.synchronizedList(new ArrayList<>()), sent = new ArrayList<>();
            MessageProducer producer = c.tools().createProducer(c.queue());
            for (int i = 0; i < 50; i++) {
                sent.add(c.text("" + i));
                producer.send(sent.get(i), new Completions(completed));
            }
            Case.until("50 completions", () -> completed.size() == 50);
            Check.equal(sent, completed);
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 50));
        });
        it("async.completed-is-in-the-queue", c -> {
            CountDownLatch done = new CountDownLatch(1);
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            c.tools().createProducer(c.queue()).send(c.text("x"), completion(done, null));
            Check.that(done.await(Case.WAIT_MS, TimeUnit.MILLISECONDS), "completed");
            Case.gets(consumer, "x");
        });
        it("async.headers-are-set-when-completed", c -> {
            CountDownLatch done = new CountDownLatch(1);
            Message message = c.text("x");
            c.tools().createProducer(c.queue()).send(message, DeliveryMode.NON_PERSISTENT, 7, 60_000, completion(done, null));
            Check.that(done.await(Case.WAIT_MS, TimeUnit.MILLISECONDS), "completed");
            Check.equal(7, message.getJMSPriority());
            Check.that(message.getJMSMessageID().startsWith("ID:"), "a message id");
            Check.equal(c.queue(), message.getJMSDestination());
        });
        it("async.not-from-the-sending-thread", c -> {
            CountDownLatch done = new CountDownLatch(1);
            Thread[] callback = new Thread[1];
            c.tools().createProducer(c.queue()).send(c.text("x"), completion(done, callback));
            Check.that(done.await(Case.WAIT_MS, TimeUnit.MILLISECONDS), "completed");
            Check.that(callback[0] != Thread.currentThread(), "another thread");
        });
        it("async.close-waits-for-completions", c -> {
            List<Message> completed = Collections.synchronizedList(new ArrayList<>());
            Session session = c.session();
            MessageProducer producer = session.createProducer(c.queue());
            for (int i = 0; i < 20; i++) producer.send(c.text("" + i), new Completions(completed));
            producer.close();
            session.close(); // the producer does not wait for the session's callback thread, but its session does
            Check.equal(20, completed.size());
        });
        it("async.order-with-synchronous-sends", c -> {
            List<Message> completed = Collections.synchronizedList(new ArrayList<>());
            MessageProducer producer = c.tools().createProducer(c.queue());
            for (int i = 0; i < 20; i++) {
                if (i % 5 == 4) producer.send(c.text("" + i));
                else producer.send(c.text("" + i), new Completions(completed));
            }
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 20));
        });
        it("async.to-a-topic", c -> {
            List<Message> completed = Collections.synchronizedList(new ArrayList<>());
            MessageConsumer consumer = c.session().createConsumer(c.topic());
            c.tools().createProducer(c.topic()).send(c.text("x"), new Completions(completed));
            Case.getsJust(consumer, "x");
            Case.until("a completion", () -> completed.size() == 1);
        });
        it("async.without-a-destination", c -> {
            List<Message> completed = Collections.synchronizedList(new ArrayList<>());
            c.tools().createProducer(null).send(c.queue(), c.text("x"), new Completions(completed));
            Case.until("a completion", () -> completed.size() == 1);
            Case.getsJust(c.session().createConsumer(c.queue()), "x");
        });
        it("async.refused-is-told-to-the-listener", c -> {
            Connection owner = c.connect();
            String name = owner.createSession().createTemporaryQueue().getQueueName();
            owner.close();
            Queue gone = c.tools().createQueue(name); // the client itself would refuse to send to the temporary queue
            MessageProducer producer = c.tools().createProducer(null);
            List<Message> completed = Collections.synchronizedList(new ArrayList<>());
            producer.send(gone, c.text("x"), new Completions(completed));
            Case.until("an answer", () -> completed.size() == 1);
            Check.none(completed.get(0));
        });
        it("async.without-a-listener-is-refused", c ->
                Check.fails(IllegalArgumentException.class, () -> c.tools().createProducer(c.queue()).send(c.text("x"), null)));
        it("async.callback-may-not-close-its-own-session", c -> {
            Session session = c.session();
            Exception[] thrown = new Exception[1];
            CountDownLatch done = new CountDownLatch(1);
            session.createProducer(c.queue()).send(c.text("x"), new CompletionListener() {
                @Override
                public void onCompletion(Message message) {
                    try {
                        session.close();
                    } catch (JMSException error) {
                        thrown[0] = error;
                    }
                    done.countDown();
                }

                @Override
                public void onException(Message message, Exception error) {
                    done.countDown();
                }
            });
            Check.that(done.await(Case.WAIT_MS, TimeUnit.MILLISECONDS), "completed");
            Check.that(thrown[0] instanceof jakarta.jms.IllegalStateException, "IllegalStateException, got " + thrown[0]);
        });
    }

    static CompletionListener completion(CountDownLatch done, Thread[] callback) {
        return new CompletionListener() {
            @Override
            public void onCompletion(Message message) {
                if (callback != null) callback[0] = Thread.currentThread();
                done.countDown();
            }

            @Override
            public void onException(Message message, Exception error) {
                throw new java.lang.IllegalStateException(error);
            }
        };
    }

    void anonymously() {
        it("anonymous.to-queues-and-topics", c -> {
            MessageConsumer onTopic = c.session().createConsumer(c.topic("t"));
            MessageProducer producer = c.tools().createProducer(null);
            producer.send(c.queue("q"), c.text("1"));
            producer.send(c.topic("t"), c.text("2"));
            Case.getsJust(c.session().createConsumer(c.queue("q")), "1");
            Case.getsJust(onTopic, "2");
        });
        it("anonymous.to-a-temporary-queue", c -> {
            TemporaryQueue queue = c.tools().createTemporaryQueue();
            c.connect().createSession().createProducer(null).send(queue, c.text("x"));
            Case.getsJust(c.session().createConsumer(queue), "x");
        });
        it("anonymous.to-many-queues", c -> {
            MessageProducer producer = c.tools().createProducer(null);
            for (int i = 0; i < 30; i++) producer.send(c.queue("" + i), c.text("" + i));
            for (int i = 0; i < 30; i++) Case.getsJust(c.tools().createConsumer(c.queue("" + i)), "" + i);
        });
        it("anonymous.needs-a-destination", c -> {
            MessageProducer producer = c.tools().createProducer(null);
            Check.fails(UnsupportedOperationException.class, () -> producer.send(c.text("x")));
            Check.fails(InvalidDestinationException.class, () -> producer.send(null, c.text("x")));
        });
        it("anonymous.not-for-a-producer-with-a-destination", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            Check.fails(UnsupportedOperationException.class, () -> producer.send(c.queue("other"), c.text("x")));
        });
        it("anonymous.request-and-reply", c -> {
            Session client = c.session(), server = c.connect().createSession();
            TemporaryQueue replies = client.createTemporaryQueue();
            TextMessage request = client.createTextMessage("question");
            request.setJMSReplyTo(replies);
            client.createProducer(c.queue()).send(request);
            Message got = Case.one(server.createConsumer(c.queue()));
            TextMessage answer = server.createTextMessage("answer");
            answer.setJMSCorrelationID(got.getJMSMessageID());
            server.createProducer(null).send(got.getJMSReplyTo(), answer);
            Message reply = Case.one(client.createConsumer(replies));
            Check.equal(request.getJMSMessageID(), reply.getJMSCorrelationID());
            Check.equal("answer", Case.textOf(reply));
        });
    }

    void producing() {
        it("producer.defaults", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            Check.equal(List.of(DeliveryMode.PERSISTENT, 4, 0L, 0L),
                    List.of(producer.getDeliveryMode(), producer.getPriority(), producer.getTimeToLive(), producer.getDeliveryDelay()));
            Check.equal(c.queue(), producer.getDestination());
        });
        it("producer.arguments-of-the-send-win", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.setPriority(1);
            producer.setTimeToLive(1);
            producer.send(c.text("x"), DeliveryMode.NON_PERSISTENT, 8, 0);
            Message got = Case.one(c.session().createConsumer(c.queue()));
            Check.equal(List.of(8, 0L), List.of(got.getJMSPriority(), got.getJMSExpiration()));
        });
        it("producer.persistent-and-not-to-one-queue", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            for (int i = 0; i < 20; i++) {
                producer.send(c.text("" + i), i % 2 == 0 ? DeliveryMode.PERSISTENT : DeliveryMode.NON_PERSISTENT, 4, 0);
            }
            List<Integer> even = new ArrayList<>(), odd = new ArrayList<>();
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            for (int i = 0; i < 20; i++) {
                int n = Integer.parseInt(Case.textOf(Case.one(consumer)));
                (n % 2 == 0 ? even : odd).add(n);
            }
            Check.equal(List.of(0, 2, 4, 6, 8, 10, 12, 14, 16, 18), even);
            Check.equal(List.of(1, 3, 5, 7, 9, 11, 13, 15, 17, 19), odd);
        });
        it("producer.many-of-a-session", c -> {
            for (int i = 0; i < 40; i++) c.tools().createProducer(c.queue()).send(c.text("" + i));
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 40));
        });
        it("producer.closed", c -> {
            MessageProducer producer = c.session().createProducer(c.queue());
            producer.close();
            producer.close();
            Check.fails(jakarta.jms.IllegalStateException.class, () -> producer.send(c.text("x")));
        });
        it("producer.of-a-stopped-connection-sends", c -> {
            Connection stopped = c.keep(c.factory().createConnection());
            Case.send(stopped.createSession(), c.queue(), "x");
            Case.getsJust(c.session().createConsumer(c.queue()), "x");
        });
        it("producer.force-async-send", c -> {
            Session session = c.connect("jms.forceAsyncSend=true").createSession();
            Case.send(session, c.queue(), Case.numbers(0, 50));
            Case.gets(c.session().createConsumer(c.queue()), Case.numbers(0, 50));
        });
        it("producer.force-sync-send", c -> {
            Session session = c.connect("jms.forceSyncSend=true").createSession();
            session.createProducer(c.queue()).send(session.createTextMessage("x"), DeliveryMode.NON_PERSISTENT, 4, 0);
            Case.getsJust(c.session().createConsumer(c.queue()), "x");
        });
    }
}
