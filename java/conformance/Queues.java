import jakarta.jms.*;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.atomic.AtomicReference;

/** Queues: order, competing consumers, ways to receive, names, connection consumers, message groups. */
final class Queues extends Suite {
    Queues() {
        order();
        competing();
        receiving();
        naming();
        groups();
    }

    void order() {
        it("queue.keeps-the-order-of-its-producer", c -> {
            c.sendNumbered(c.queue(), 300);
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 300));
        });
        it("queue.keeps-the-order-of-persistent-messages", c -> {
            c.send(c.queue(), Case.numbers(0, 30));
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 30));
        });
        it("queue.keeps-the-order-over-sessions-in-turn", c -> {
            for (int i = 0; i < 10; i++) Case.send(c.session(), c.queue(), "" + i);
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 10));
        });
        it("queue.higher-priorities-first", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            for (int priority : new int[] {4, 0, 9, 5, 4, 1}) producer.send(c.text("" + priority), DeliveryMode.PERSISTENT, priority, 0);
            Case.getsJust(c.session().createConsumer(c.queue()), "9", "5", "4", "4", "1", "0");
        });
        it("queue.order-within-a-priority", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            for (int i = 0; i < 12; i++) producer.send(c.text(i % 3 + "." + i), DeliveryMode.PERSISTENT, i % 3 + 3, 0);
            Case.getsJust(c.session().createConsumer(c.queue()), "2.2", "2.5", "2.8", "2.11", "1.1", "1.4", "1.7", "1.10", "0.0", "0.3",
                    "0.6", "0.9");
        });
        it("queue.keeps-what-comes-while-nobody-listens", c -> {
            c.send(c.queue(), "waits");
            c.tools().close();
            Case.getsJust(c.connect().createSession().createConsumer(c.connection().createSession().createQueue(c.name)), "waits");
        });
        it("queue.prefetched-come-back-in-their-place", c -> {
            c.sendNumbered(c.queue(), 10);
            Connection other = c.connect();
            MessageConsumer greedy = other.createSession().createConsumer(c.queue());
            Case.gets(greedy, "0", "1");
            other.close();
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(2, 10));
        });
        it("queue.consumer-that-leaves-gives-back-what-it-held", c -> {
            c.sendNumbered(c.queue(), 5);
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            Case.gets(consumer, "0");
            consumer.close();
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(1, 5));
        });
    }

    void competing() {
        it("queue.each-message-goes-to-one-consumer", c -> {
            Set<Integer> taken = new TreeSet<>();
            List<MessageConsumer> consumers = new ArrayList<>();
            for (int i = 0; i < 3; i++) consumers.add(c.connect("jms.prefetchPolicy.all=5").createSession().createConsumer(c.queue()));
            c.sendNumbered(c.queue(), 60);
            int count = 0;
            for (int idle = 0; count < 60 && idle < 50; idle++) {
                for (MessageConsumer each : consumers) {
                    for (Message message; (message = each.receive(20)) != null; count++) {
                        taken.add(Integer.valueOf(Case.textOf(message)));
                        idle = 0;
                    }
                }
            }
            Check.equal(60, count);
            Check.equal(60, taken.size());
        });
        it("queue.consumers-share-with-prefetch-1", c -> {
            MessageConsumer first = c.connect("jms.prefetchPolicy.all=1").createSession().createConsumer(c.queue());
            MessageConsumer second = c.connect("jms.prefetchPolicy.all=1").createSession().createConsumer(c.queue());
            c.sendNumbered(c.queue(), 20);
            // The consumer that asks first gets the next message, so consumers in turn do not receive exactly ten each.
            int[] taken = new int[2];
            for (long deadline = System.nanoTime() + Case.WAIT_MS * 1_000_000; taken[0] + taken[1] < 20 && System.nanoTime() < deadline; ) {
                if (first.receive(20) != null) taken[0]++;
                if (second.receive(20) != null) taken[1]++;
            }
            Check.equal(20, taken[0] + taken[1]);
            Check.that(Math.min(taken[0], taken[1]) >= 5, "each got its share: " + taken[0] + " and " + taken[1]);
        });
        it("queue.slow-consumer-holds-no-other-back", c -> {
            MessageConsumer slow = c.connect("jms.prefetchPolicy.all=1").createSession(Session.CLIENT_ACKNOWLEDGE)
                    .createConsumer(c.queue());
            c.sendNumbered(c.queue(), 1);
            Case.one(slow);
            MessageConsumer quick = c.connect("jms.prefetchPolicy.all=1").createSession().createConsumer(c.queue());
            c.sendNumbered(c.queue(), 20);
            int taken = 0;
            while (taken < 19 && quick.receive(Case.WAIT_MS) != null) taken++;
            Check.equal(19, taken); // at most one message was prefetched for the slow consumer
        });
        it("queue.prefetch-of-100-is-not-exceeded", c -> {
            MessageConsumer holder = c.connect("jms.prefetchPolicy.all=100").createSession(Session.CLIENT_ACKNOWLEDGE)
                    .createConsumer(c.queue());
            c.sendNumbered(c.queue(), 150);
            MessageConsumer rest = c.session().createConsumer(c.queue());
            for (int i = 0; i < 50; i++) Case.one(rest);
            Case.nothing(rest);
            Case.one(holder);
        });
        it("queue.two-consumers-of-a-session", c -> {
            Session session = c.session();
            MessageConsumer one = session.createConsumer(c.queue("one")), two = session.createConsumer(c.queue("two"));
            c.send(c.queue("one"), "1");
            c.send(c.queue("two"), "2");
            Case.getsJust(two, "2");
            Case.getsJust(one, "1");
        });
    }

    void receiving() {
        it("receive.waits-for-a-message", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            Thread sender = new Thread(() -> {
                try {
                    Thread.sleep(50);
                    Case.send(c.connect().createSession(), c.queue(), "late");
                } catch (Exception error) {
                    throw new java.lang.IllegalStateException(error);
                }
            });
            sender.start();
            Check.equal("late", Case.textOf(consumer.receive()));
            sender.join();
        });
        it("receive.returns-null-after-its-time", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            long before = System.nanoTime();
            Check.none(consumer.receive(100));
            Check.that(System.nanoTime() - before >= 95_000_000, "it waited");
        });
        it("receive.no-wait-says-at-once", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            Check.none(consumer.receiveNoWait());
            c.send(c.queue(), "x");
            Check.equal("x", Case.textOf(consumer.receiveNoWait()));
            Check.none(consumer.receiveNoWait());
        });
        it("receive.no-wait-without-prefetch", c -> {
            MessageConsumer consumer = c.connect("jms.prefetchPolicy.all=0").createSession().createConsumer(c.queue());
            Check.none(consumer.receiveNoWait());
            c.send(c.queue(), "0", "1");
            Check.equal("0", Case.textOf(consumer.receiveNoWait()));
            Check.equal("1", Case.textOf(consumer.receiveNoWait()));
            Check.none(consumer.receiveNoWait());
        });
        it("receive.without-prefetch-one-at-a-time", c -> {
            MessageConsumer consumer = c.connect("jms.prefetchPolicy.all=0").createSession().createConsumer(c.queue());
            c.sendNumbered(c.queue(), 10);
            Case.gets(consumer, "0", "1", "2");
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(3, 10));
        });
        it("receive.without-prefetch-waits", c -> {
            MessageConsumer consumer = c.connect("jms.prefetchPolicy.all=0").createSession().createConsumer(c.queue());
            Check.none(consumer.receive(50));
            c.send(c.queue(), "x");
            Case.gets(consumer, "x");
        });
        it("receive.with-prefetch-1", c -> {
            MessageConsumer consumer = c.connect("jms.prefetchPolicy.all=1").createSession().createConsumer(c.queue());
            c.sendNumbered(c.queue(), 10);
            Case.getsJust(consumer, Case.numbers(0, 10));
        });
        it("receive.with-prefetch-of-queues-10", c -> {
            MessageConsumer consumer = c.connect("jms.prefetchPolicy.queuePrefetch=10").createSession().createConsumer(c.queue());
            c.sendNumbered(c.queue(), 35);
            Case.getsJust(consumer, Case.numbers(0, 35));
        });
        it("receive.ended-by-close-of-the-consumer", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            AtomicReference<Object> got = new AtomicReference<>("still waiting");
            Thread receiver = new Thread(() -> {
                try {
                    got.set(consumer.receive());
                } catch (JMSException error) {
                    got.set(error);
                }
            });
            receiver.start();
            Case.until("the receiver to wait", () -> receiver.getState() == Thread.State.WAITING
                    || receiver.getState() == Thread.State.TIMED_WAITING);
            consumer.close();
            receiver.join(Case.WAIT_MS);
            Check.none(got.get());
        });
        it("receive.local-only-looks-at-what-was-prefetched", c -> {
            MessageConsumer consumer = c.connect("jms.receiveNoWaitLocalOnly=true", "jms.receiveLocalOnly=true").createSession()
                    .createConsumer(c.queue());
            c.send(c.queue(), "x");
            Case.until("the message to be prefetched", () -> "x".equals(Case.textOf(consumer.receiveNoWait())));
        });
        it("receive.with-a-listener-set-is-refused", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            consumer.setMessageListener(message -> {});
            Check.fails(jakarta.jms.IllegalStateException.class, () -> consumer.receive(10));
        });
    }

    void naming() {
        it("queue.name-with-its-prefix", c -> {
            c.send(c.tools().createQueue("queue://" + c.name), "x");
            Case.getsJust(c.session().createConsumer(c.queue()), "x");
        });
        it("queue.names-with-odd-characters", c -> {
            for (String odd : List.of("a b", "ż", "a/b", "a-b_c", "a+b=c&d")) {
                c.send(c.queue(odd), "x");
                Case.getsJust(c.session().createConsumer(c.queue(odd)), "x");
            }
        });
        it("queue.name-is-case-sensitive", c -> {
            c.send(c.queue("A"), "x");
            Case.nothing(c.session().createConsumer(c.queue("a")));
        });
        it("queue.of-the-name-of-a-topic-is-apart", c -> {
            MessageConsumer onQueue = c.session().createConsumer(c.queue()), onTopic = c.session().createConsumer(c.topic());
            MessageProducer anonymous = c.tools().createProducer(null);
            anonymous.send(c.queue(), c.text("to the queue"));
            anonymous.send(c.topic(), c.text("to the topic"));
            Case.getsJust(onQueue, "to the queue");
            Case.getsJust(onTopic, "to the topic");
        });
        it("queue.legacy-interfaces", c -> {
            QueueConnection connection = c.keep(c.factory().createQueueConnection());
            connection.start();
            QueueSession session = connection.createQueueSession(false, Session.AUTO_ACKNOWLEDGE);
            session.createSender(c.queue()).send(session.createTextMessage("x"));
            Case.getsJust(session.createReceiver(c.queue()), "x");
            for (Check.Action each : List.<Check.Action>of(() -> session.createDurableSubscriber(c.topic(), "s"),
                    () -> session.createDurableConsumer(c.topic(), "s"),
                    () -> session.createSharedConsumer(c.topic(), "s"), () -> session.createSharedDurableConsumer(c.topic(), "s"),
                    session::createTemporaryTopic, () -> session.createTopic("t"), () -> session.unsubscribe("s"))) {
                Check.fails(jakarta.jms.IllegalStateException.class, each);
            }
        });
        it("connection-consumer.of-a-queue", c -> {
            List<String> got = Collections.synchronizedList(new ArrayList<>());
            connectionConsumer(c, got, (connection, pool) -> connection.createConnectionConsumer(c.queue(), "n > 0", pool, 1));
            c.sendNumbered(c.queue(), 3);
            Case.until("two messages", () -> got.equals(List.of("1", "2")));
        });
        it("connection-consumer.of-a-shared-durable-subscription", c -> {
            List<String> got = Collections.synchronizedList(new ArrayList<>());
            connectionConsumer(c, got, (connection, pool) ->
                    connection.createSharedDurableConnectionConsumer(c.topic(), c.name, null, pool, 1));
            c.send(c.topic(), "0", "1");
            Case.until("two messages", () -> got.equals(List.of("0", "1")));
        });
        it("queue.requestor", c -> {
            QueueConnection connection = c.keep(c.factory().createQueueConnection());
            connection.start();
            QueueSession session = connection.createQueueSession(false, Session.AUTO_ACKNOWLEDGE);
            Session server = c.session();
            MessageProducer answers = server.createProducer(null);
            server.createConsumer(c.queue()).setMessageListener(request -> {
                try {
                    answers.send(request.getJMSReplyTo(), server.createTextMessage("re: " + Case.textOf(request)));
                } catch (JMSException error) {
                    throw new java.lang.IllegalStateException(error);
                }
            });
            Check.equal("re: x", Case.textOf(new QueueRequestor(session, c.queue()).request(session.createTextMessage("x"))));
        });
    }

    interface Consuming {
        ConnectionConsumer by(Connection connection, ServerSessionPool pool) throws JMSException;
    }

    /** An application server with one session. */
    static void connectionConsumer(Case c, List<String> got, Consuming consuming) throws JMSException {
        Connection connection = c.connect();
        Session session = connection.createSession();
        session.setMessageListener(message -> {
            try {
                got.add(Case.textOf(message));
            } catch (JMSException error) {
                got.add(error.toString());
            }
        });
        consuming.by(connection, () -> new ServerSession() {
            @Override
            public Session getSession() {
                return session;
            }

            @Override
            public void start() {
                session.run();
            }
        });
    }

    void groups() {
        it("group.goes-to-one-consumer", c -> {
            MessageConsumer first = c.connect().createSession().createConsumer(c.queue());
            MessageConsumer second = c.connect().createSession().createConsumer(c.queue());
            sendGroups(c, 20, "g");
            String[] all = Case.numbers(0, 20);
            Message one = first.receive(Case.SILENCE_MS);
            MessageConsumer owner = one == null ? second : first, other = one == null ? first : second;
            Case.getsJust(owner, one == null ? all : Case.numbers(1, 20));
            Case.nothing(other);
        });
        it("group.several-are-spread-and-each-is-kept-together", c -> {
            MessageConsumer first = ready(c), second = ready(c);
            sendGroups(c, 24, "g0", "g1", "g2", "g3");
            List<String> one = groupsOf(first), two = groupsOf(second);
            Check.equal(24, one.size() + two.size());
            Check.that(Collections.disjoint(Set.copyOf(one), Set.copyOf(two)), "no group at both: " + one + two);
            Check.that(!one.isEmpty() && !two.isEmpty(), "groups at both");
        });
        it("group.is-handed-over-when-its-consumer-leaves", c -> {
            Connection leaving = c.connect();
            MessageConsumer first = leaving.createSession().createConsumer(c.queue());
            sendGroups(c, 3, "g");
            Case.gets(first, "0", "1");
            MessageConsumer second = c.connect().createSession().createConsumer(c.queue());
            Case.nothing(second);
            leaving.close();
            Case.getsJust(second, "2");
        });
        it("group.does-not-hold-back-what-has-none", c -> {
            MessageConsumer owner = c.connect("jms.prefetchPolicy.all=1").createSession(Session.CLIENT_ACKNOWLEDGE)
                    .createConsumer(c.queue());
            sendGroups(c, 1, "g");
            Case.one(owner);
            MessageConsumer free = c.connect("jms.prefetchPolicy.all=1").createSession().createConsumer(c.queue());
            sendGroups(c, 2, "g");
            c.send(c.queue(), "without");
            Case.getsJust(free, "without");
        });
    }

    /** A consumer whose credit has reached the broker: a later request of its session is answered. */
    static MessageConsumer ready(Case c) throws JMSException {
        Session session = c.connect().createSession();
        MessageConsumer consumer = session.createConsumer(c.queue());
        session.createProducer(c.queue()).close();
        return consumer;
    }

    static void sendGroups(Case c, int count, String... groups) throws JMSException {
        MessageProducer producer = c.tools().createProducer(c.queue());
        producer.setDeliveryMode(DeliveryMode.NON_PERSISTENT);
        for (int i = 0; i < count; i++) {
            TextMessage message = c.text("" + i);
            message.setStringProperty("JMSXGroupID", groups[i % groups.length]);
            producer.send(message);
        }
    }

    static List<String> groupsOf(MessageConsumer consumer) throws JMSException {
        List<String> out = new ArrayList<>();
        for (Message message; (message = consumer.receive(Case.SILENCE_MS)) != null; ) out.add(message.getStringProperty("JMSXGroupID"));
        return out;
    }
}
