import jakarta.jms.*;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

/** Message listeners of consumers of queues. */
final class Listeners extends Suite {
    Listeners() {
        listening();
    }

    void listening() {
        it("listener.gets-every-message-in-order", c -> {
            List<String> got = Collections.synchronizedList(new ArrayList<>());
            listen(c.session().createConsumer(c.queue()), got);
            c.sendNumbered(c.queue(), 100);
            Case.until("100 messages", () -> got.size() == 100);
            Check.equal(List.of(Case.numbers(0, 100)), got);
        });
        it("listener.of-a-session-run-one-at-a-time", c -> {
            Connection connection = c.keep(c.factory().createConnection());
            Session session = connection.createSession();
            AtomicInteger running = new AtomicInteger(), most = new AtomicInteger();
            CountDownLatch done = new CountDownLatch(20);
            for (String each : List.of("one", "two")) {
                session.createConsumer(c.queue(each)).setMessageListener(message -> {
                    most.accumulateAndGet(running.incrementAndGet(), Math::max);
                    Thread.yield();
                    running.decrementAndGet();
                    done.countDown();
                });
                c.sendNumbered(c.queue(each), 10);
            }
            connection.start();
            Check.that(done.await(Case.WAIT_MS, TimeUnit.MILLISECONDS), "20 messages came");
            Check.equal(1, most.get());
        });
        it("listener.of-two-sessions-run-at-once", c -> {
            CountDownLatch both = new CountDownLatch(2);
            for (int i = 0; i < 2; i++) {
                c.connect("jms.prefetchPolicy.all=1").createSession().createConsumer(c.queue()).setMessageListener(message -> {
                    both.countDown();
                    try {
                        both.await(Case.WAIT_MS, TimeUnit.MILLISECONDS);
                    } catch (InterruptedException ignored) {
                        Thread.currentThread().interrupt();
                    }
                });
            }
            c.sendNumbered(c.queue(), 2);
            Check.that(both.await(Case.WAIT_MS, TimeUnit.MILLISECONDS), "both listeners run at once");
        });
        it("listener.that-throws-gets-the-message-again", c -> {
            List<Message> got = Collections.synchronizedList(new ArrayList<>());
            c.session().createConsumer(c.queue()).setMessageListener(message -> {
                got.add(message);
                if (got.size() == 1) throw new IllegalArgumentException("on purpose");
            });
            c.send(c.queue(), "x");
            Case.until("a second delivery", () -> got.size() == 2);
            Check.equal(got.get(0).getJMSMessageID(), got.get(1).getJMSMessageID());
        });
        it("listener.that-throws-in-client-acknowledge-gets-the-next", c -> throwing(c, Session.CLIENT_ACKNOWLEDGE));
        it("listener.that-throws-in-a-transaction-gets-the-next", c -> throwing(c, Session.SESSION_TRANSACTED));
        it("listener.may-send-and-commit", c -> {
            Session session = c.session(Session.SESSION_TRANSACTED);
            MessageProducer answers = session.createProducer(c.queue("answers"));
            session.createConsumer(c.queue()).setMessageListener(message -> {
                try {
                    answers.send(session.createTextMessage("re: " + Case.textOf(message)));
                    session.commit();
                } catch (JMSException error) {
                    throw new java.lang.IllegalStateException(error);
                }
            });
            c.send(c.queue(), "a", "b");
            Case.gets(c.connect().createSession().createConsumer(c.queue("answers")), "re: a", "re: b");
        });
        it("listener.stops-when-the-consumer-is-closed", c -> {
            List<String> got = Collections.synchronizedList(new ArrayList<>());
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            listen(consumer, got);
            c.send(c.queue(), "before");
            Case.until("a message", () -> got.size() == 1);
            consumer.close();
            c.send(c.queue(), "after");
            Case.getsJust(c.session().createConsumer(c.queue()), "after");
            Check.equal(List.of("before"), got);
        });
    }

    /** The next message arrives, and the one of the failed session is redelivered. */
    static void throwing(Case c, int mode) throws Exception {
        List<String> got = Collections.synchronizedList(new ArrayList<>());
        Connection connection = c.connect();
        connection.createSession(mode).createConsumer(c.queue()).setMessageListener(message -> {
            try {
                got.add(Case.textOf(message));
            } catch (JMSException error) {
                throw new java.lang.IllegalStateException(error);
            }
            if (got.size() == 1) throw new IllegalArgumentException("on purpose");
        });
        c.send(c.queue(), "0", "1");
        Case.until("the second message", () -> got.equals(List.of("0", "1")));
        connection.close();
        Case.gets(c.session().createConsumer(c.queue()), "0", "1");
    }

    static void listen(MessageConsumer consumer, List<String> into) throws JMSException {
        consumer.setMessageListener(message -> {
            try {
                into.add(Case.textOf(message));
            } catch (JMSException error) {
                into.add(error.toString());
            }
        });
    }
}
