import jakarta.jms.*;
import java.util.ArrayList;
import java.util.List;

/** Transacted sessions. */
final class Transactions extends Suite {
    Transactions() {
        sending();
        receiving();
        both();
        ending();
        refusing();
    }

    static Session transacted(Case c) throws JMSException {
        return c.session(Session.SESSION_TRANSACTED);
    }

    void sending() {
        it("transaction.sent-is-seen-after-the-commit", c -> {
            Session session = transacted(c);
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            Case.send(session, c.queue(), "0", "1");
            Case.nothing(consumer);
            session.commit();
            Case.getsJust(consumer, "0", "1");
        });
        it("transaction.sent-and-rolled-back-never-was", c -> {
            Session session = transacted(c);
            Case.send(session, c.queue(), "lost");
            session.rollback();
            Case.send(session, c.queue(), "kept");
            session.commit();
            Case.getsJust(c.session().createConsumer(c.queue()), "kept");
        });
        it("transaction.sent-to-several-queues-at-once", c -> {
            Session session = transacted(c);
            MessageConsumer one = c.session().createConsumer(c.queue("one")), two = c.session().createConsumer(c.queue("two"));
            Case.send(session, c.queue("one"), "1");
            Case.send(session, c.queue("two"), "2");
            Case.nothing(one);
            session.commit();
            Case.getsJust(one, "1");
            Case.getsJust(two, "2");
        });
        it("transaction.sent-to-a-topic", c -> {
            Session session = transacted(c);
            MessageConsumer consumer = c.session().createConsumer(c.topic());
            Case.send(session, c.topic(), "x");
            Case.nothing(consumer);
            session.commit();
            Case.getsJust(consumer, "x");
        });
        it("transaction.sent-to-a-topic-and-rolled-back", c -> {
            Session session = transacted(c);
            MessageConsumer consumer = c.session().createConsumer(c.topic());
            Case.send(session, c.topic(), "x");
            session.rollback();
            Case.nothing(consumer);
        });
        it("transaction.non-persistent-too", c -> {
            Session session = transacted(c);
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            session.createProducer(c.queue()).send(session.createTextMessage("x"), DeliveryMode.NON_PERSISTENT, 4, 0);
            Case.nothing(consumer);
            session.commit();
            Case.getsJust(consumer, "x");
        });
        it("transaction.keeps-the-order", c -> {
            Session session = transacted(c);
            Case.send(session, c.queue(), Case.numbers(0, 200));
            session.commit();
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 200));
        });
        it("transaction.priorities", c -> {
            Session session = transacted(c);
            MessageProducer producer = session.createProducer(c.queue());
            for (int priority : new int[] {1, 9, 4}) {
                producer.send(session.createTextMessage("" + priority), DeliveryMode.PERSISTENT, priority, 0);
            }
            session.commit();
            Case.getsJust(c.session().createConsumer(c.queue()), "9", "4", "1");
        });
        it("transaction.anonymous-producer", c -> {
            Session session = transacted(c);
            MessageProducer producer = session.createProducer(null);
            producer.send(c.queue("one"), session.createTextMessage("1"));
            producer.send(c.queue("two"), session.createTextMessage("2"));
            session.rollback();
            producer.send(c.queue("two"), session.createTextMessage("3"));
            session.commit();
            Case.nothing(c.session().createConsumer(c.queue("one")));
            Case.getsJust(c.session().createConsumer(c.queue("two")), "3");
        });
        it("transaction.of-a-thousand-messages", c -> {
            Session session = transacted(c);
            Case.send(session, c.queue(), Case.numbers(0, 1000));
            session.commit();
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 1000));
        });
        it("transaction.asynchronous-sends-are-complete-before-the-commit", c -> {
            Session session = transacted(c);
            MessageProducer producer = session.createProducer(c.queue());
            List<Message> completed = java.util.Collections.synchronizedList(new ArrayList<>());
            for (int i = 0; i < 20; i++) producer.send(session.createTextMessage("" + i), new Delivery.Completions(completed));
            session.commit();
            // The older client calls the last listener as the commit returns.
            Case.until("the completions", () -> completed.size() == 20);
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 20));
        });
    }

    void receiving() {
        it("transaction.received-is-gone-after-the-commit", c -> {
            c.send(c.queue(), "0", "1");
            Session session = c.connect().createSession(Session.SESSION_TRANSACTED);
            Case.gets(session.createConsumer(c.queue()), "0");
            session.commit();
            session.close();
            Case.getsJust(c.session().createConsumer(c.queue()), "1");
        });
        it("transaction.received-and-rolled-back-comes-again-marked", c -> {
            c.send(c.queue(), "0", "1");
            Session session = transacted(c);
            MessageConsumer consumer = session.createConsumer(c.queue());
            Case.gets(consumer, "0", "1");
            session.rollback();
            Acknowledging.again(consumer, "0", 2);
            Acknowledging.again(consumer, "1", 2);
            session.commit();
        });
        it("transaction.rolled-back-goes-also-to-others", c -> {
            c.send(c.queue(), "x");
            Session session = c.connect().createSession(Session.SESSION_TRANSACTED);
            Case.gets(session.createConsumer(c.queue()), "x");
            session.close();
            Acknowledging.again(c.session().createConsumer(c.queue()), "x", 2);
        });
        it("transaction.rollback-keeps-the-order-with-what-was-not-received", c -> {
            c.send(c.queue(), Case.numbers(0, 10));
            Session session = transacted(c);
            MessageConsumer consumer = session.createConsumer(c.queue());
            Case.gets(consumer, Case.numbers(0, 4));
            session.rollback();
            Case.gets(consumer, Case.numbers(0, 10));
            session.commit();
        });
        it("transaction.rollback-counts", c -> {
            c.send(c.queue(), "x");
            Session session = transacted(c);
            MessageConsumer consumer = session.createConsumer(c.queue());
            Case.one(consumer);
            for (int count = 2; count < 6; count++) {
                session.rollback();
                Acknowledging.again(consumer, "x", count);
            }
        });
        it("transaction.received-is-hidden-from-others-until-the-rollback", c -> {
            c.send(c.queue(), "x");
            Session session = c.connect("jms.prefetchPolicy.all=0").createSession(Session.SESSION_TRANSACTED);
            Case.gets(session.createConsumer(c.queue()), "x");
            MessageConsumer other = c.session().createConsumer(c.queue());
            Case.nothing(other);
            session.close();
            Case.gets(other, "x");
        });
        it("transaction.of-several-consumers", c -> {
            c.send(c.queue("one"), "1");
            c.send(c.queue("two"), "2");
            Session session = transacted(c);
            MessageConsumer one = session.createConsumer(c.queue("one")), two = session.createConsumer(c.queue("two"));
            Case.gets(one, "1");
            Case.gets(two, "2");
            session.rollback();
            Case.gets(one, "1");
            Case.gets(two, "2");
            session.commit();
            Case.nothing(one);
        });
        it("transaction.commit-after-the-consumer-is-closed", c -> {
            c.send(c.queue(), "x");
            Session session = transacted(c);
            MessageConsumer consumer = session.createConsumer(c.queue());
            Case.gets(consumer, "x");
            consumer.close();
            session.commit();
            Case.nothing(c.session().createConsumer(c.queue()));
        });
        it("transaction.rollback-after-the-consumer-is-closed", c -> {
            c.send(c.queue(), "x");
            Session session = transacted(c);
            MessageConsumer consumer = session.createConsumer(c.queue());
            Case.gets(consumer, "x");
            consumer.close();
            session.rollback();
            Case.gets(c.session().createConsumer(c.queue()), "x");
        });
        it("transaction.received-a-thousand", c -> {
            c.sendNumbered(c.queue(), 1200);
            Session session = transacted(c);
            MessageConsumer consumer = session.createConsumer(c.queue());
            Case.gets(consumer, Case.numbers(0, 1200));
            session.rollback();
            Case.gets(consumer, Case.numbers(0, 1200));
            session.commit();
            Case.nothing(c.session().createConsumer(c.queue()));
        });
        it("transaction.by-a-listener-rolled-back-once", c -> {
            Session session = transacted(c);
            List<Integer> counts = java.util.Collections.synchronizedList(new ArrayList<>());
            session.createConsumer(c.queue()).setMessageListener(message -> {
                try {
                    counts.add(message.getIntProperty("JMSXDeliveryCount"));
                    if (counts.size() == 1) session.rollback();
                    else session.commit();
                } catch (JMSException error) {
                    throw new java.lang.IllegalStateException(error);
                }
            });
            c.send(c.queue(), "x");
            Case.until("two deliveries", () -> counts.size() == 2);
            Check.equal(List.of(1, 2), counts);
        });
    }

    void both() {
        it("transaction.receive-and-send-commit", c -> {
            c.send(c.queue("in"), "x");
            Session session = transacted(c);
            Case.gets(session.createConsumer(c.queue("in")), "x");
            Case.send(session, c.queue("out"), "y");
            session.commit();
            session.close();
            Case.nothing(c.session().createConsumer(c.queue("in")));
            Case.getsJust(c.session().createConsumer(c.queue("out")), "y");
        });
        it("transaction.receive-and-send-roll-back", c -> {
            c.send(c.queue("in"), "x");
            Session session = transacted(c);
            Case.gets(session.createConsumer(c.queue("in")), "x");
            Case.send(session, c.queue("out"), "y");
            session.rollback();
            session.close();
            Case.getsJust(c.session().createConsumer(c.queue("in")), "x");
            Case.nothing(c.session().createConsumer(c.queue("out")));
        });
        it("transaction.to-the-queue-it-receives-from", c -> {
            Session session = transacted(c);
            MessageConsumer consumer = session.createConsumer(c.queue());
            Case.send(session, c.queue(), "x");
            Case.nothing(consumer);
            session.commit();
            Case.gets(consumer, "x");
        });
        it("transaction.sessions-of-a-connection-are-apart", c -> {
            Session one = transacted(c), two = transacted(c);
            Case.send(one, c.queue(), "1");
            Case.send(two, c.queue(), "2");
            one.rollback();
            two.commit();
            Case.getsJust(c.session().createConsumer(c.queue()), "2");
        });
        it("transaction.beside-sends-without-one", c -> {
            Session session = transacted(c);
            Case.send(session, c.queue(), "in the transaction");
            c.send(c.queue(), "at once");
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            Case.getsJust(consumer, "at once");
            session.commit();
            Case.getsJust(consumer, "in the transaction");
        });
        it("transaction.many-at-once", c -> {
            List<Session> sessions = new ArrayList<>();
            for (int i = 0; i < 30; i++) sessions.add(transacted(c));
            for (Session each : sessions) Case.send(each, c.queue(), "x");
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            Case.nothing(consumer);
            for (Session each : sessions) each.commit();
            for (int i = 0; i < 30; i++) Case.gets(consumer, "x");
        });
        it("transaction.one-after-another", c -> {
            Session session = transacted(c);
            for (int i = 0; i < 40; i++) {
                Case.send(session, c.queue(), "" + i);
                if (i % 4 == 3) session.rollback();
                else session.commit();
            }
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            for (int i = 0; i < 40; i++) if (i % 4 != 3) Case.gets(consumer, "" + i);
            Case.nothing(consumer);
        });
        it("transaction.empty", c -> {
            Session session = transacted(c);
            session.commit();
            session.rollback();
            session.commit();
        });
        it("transaction.acknowledge-in-it-is-ignored", c -> {
            c.send(c.queue(), "x");
            Session session = transacted(c);
            MessageConsumer consumer = session.createConsumer(c.queue());
            Case.one(consumer).acknowledge();
            session.rollback();
            Case.gets(consumer, "x");
        });
    }

    void ending() {
        it("transaction.closed-session-rolls-back", c -> {
            c.send(c.queue("in"), "x");
            Session session = transacted(c);
            Case.gets(session.createConsumer(c.queue("in")), "x");
            Case.send(session, c.queue("out"), "y");
            session.close();
            Case.gets(c.session().createConsumer(c.queue("in")), "x");
            Case.nothing(c.session().createConsumer(c.queue("out")));
        });
        it("transaction.closed-connection-rolls-back", c -> {
            c.send(c.queue("in"), "x");
            Connection other = c.connect();
            Session session = other.createSession(Session.SESSION_TRANSACTED);
            Case.gets(session.createConsumer(c.queue("in")), "x");
            Case.send(session, c.queue("out"), "y");
            other.close();
            Case.gets(c.session().createConsumer(c.queue("in")), "x");
            Case.nothing(c.session().createConsumer(c.queue("out")));
        });
        it("transaction.closed-session-leaves-its-neighbours", c -> {
            Session one = transacted(c), two = transacted(c);
            Case.send(one, c.queue(), "1");
            Case.send(two, c.queue(), "2");
            one.close();
            two.commit();
            Case.getsJust(c.session().createConsumer(c.queue()), "2");
        });
    }

    void refusing() {
        it("transaction.commit-of-a-session-without-one-fails", c -> {
            Session session = c.session();
            Check.fails(jakarta.jms.IllegalStateException.class, session::commit);
            Check.fails(jakarta.jms.IllegalStateException.class, session::rollback);
        });
        it("transaction.with-a-refused-message-is-rolled-back", c -> {
            Connection owner = c.connect();
            String name = owner.createSession().createTemporaryQueue().getQueueName();
            owner.close();
            Session session = transacted(c);
            Queue gone = session.createQueue(name); // the client itself would refuse to send to the temporary queue
            MessageProducer producer = session.createProducer(null);
            producer.send(c.queue(), session.createTextMessage("x"));
            producer.send(gone, session.createTextMessage("refused"));
            Check.fails(TransactionRolledBackException.class, session::commit);
            producer.send(c.queue(), session.createTextMessage("y"));
            session.commit();
            Case.getsJust(c.session().createConsumer(c.queue()), "y");
        });
        it("transaction.larger-than-the-broker-takes-is-rolled-back-whole", c -> {
            Session session = transacted(c);
            MessageProducer producer = session.createProducer(c.queue());
            BytesMessage message = session.createBytesMessage();
            message.writeBytes(new byte[1 << 20]);
            try {
                for (int i = 0; i < 70; i++) producer.send(message);
                session.commit();
                MessageConsumer consumer = c.session().createConsumer(c.queue());
                for (int i = 0; i < 70; i++) Case.one(consumer);
            } catch (TransactionRolledBackException tooLarge) {
                Case.nothing(c.session().createConsumer(c.queue()));
            }
        });
    }
}
