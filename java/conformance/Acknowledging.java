import jakarta.jms.*;
import java.util.ArrayList;
import java.util.List;

/** Acknowledge modes, redelivery and its marks, and messages that no consumer can process. */
final class Acknowledging extends Suite {
    /** The client's own mode: Message.acknowledge() acknowledges only that message. */
    static final int INDIVIDUAL = 101, NONE = 100;
    static final int DELIVERIES_MAX = 10;

    Acknowledging() {
        automatic();
        byTheClient();
        recovering();
        poison();
    }

    void automatic() {
        it("auto.received-is-gone", c -> {
            c.send(c.queue(), "0", "1");
            Connection other = c.connect();
            Case.gets(other.createSession().createConsumer(c.queue()), "0");
            other.close();
            Case.getsJust(c.session().createConsumer(c.queue()), "1");
        });
        it("auto.acknowledge-is-ignored", c -> {
            c.send(c.queue(), "x");
            Case.one(c.session().createConsumer(c.queue())).acknowledge();
            Case.nothing(c.session().createConsumer(c.queue()));
        });
        it("auto.prefetched-and-not-seen-comes-to-another", c -> {
            c.send(c.queue(), "0", "1", "2");
            Connection other = c.connect();
            Case.gets(other.createSession().createConsumer(c.queue()), "0");
            other.close();
            // Whether the messages are marked. Bascule marks them: when a session closes, it cannot tell what the application has seen.
            Case.getsJust(c.session().createConsumer(c.queue()), "1", "2");
        });
        it("dups-ok.received-is-gone", c -> {
            c.send(c.queue(), "0", "1");
            Connection other = c.connect();
            MessageConsumer consumer = other.createSession(Session.DUPS_OK_ACKNOWLEDGE).createConsumer(c.queue());
            Case.getsJust(consumer, "0", "1");
            other.close();
            Case.nothing(c.session().createConsumer(c.queue()));
        });
        it("no-acknowledge.settled-as-they-are-sent", c -> {
            c.send(c.queue(), "0", "1");
            Connection other = c.connect();
            Case.getsJust(other.createSession(NONE).createConsumer(c.queue()), "0", "1");
            other.close();
            Case.nothing(c.session().createConsumer(c.queue()));
        });
        it("presettled.producer-and-consumer", c -> {
            Session session = c.connect("jms.presettlePolicy.presettleAll=true").createSession();
            MessageConsumer consumer = session.createConsumer(c.queue());
            Case.send(session, c.queue(), "0", "1", "2");
            Case.gets(consumer, "0", "1", "2");
        });
        it("auto.by-a-listener", c -> {
            List<String> got = java.util.Collections.synchronizedList(new ArrayList<>());
            Connection other = c.connect();
            Listeners.listen(other.createSession().createConsumer(c.queue()), got);
            c.send(c.queue(), "0", "1");
            Case.until("two messages", () -> got.size() == 2);
            other.close();
            Case.nothing(c.session().createConsumer(c.queue()));
        });
    }

    void byTheClient() {
        it("client.unacknowledged-comes-again-marked", c -> {
            c.send(c.queue(), "x");
            Connection other = c.connect();
            Case.gets(other.createSession(Session.CLIENT_ACKNOWLEDGE).createConsumer(c.queue()), "x");
            other.close();
            again(c.session().createConsumer(c.queue()), "x", 2);
        });
        it("client.acknowledges-all-that-its-session-got", c -> {
            Session session = c.connect().createSession(Session.CLIENT_ACKNOWLEDGE);
            MessageConsumer one = session.createConsumer(c.queue("one")), two = session.createConsumer(c.queue("two"));
            c.send(c.queue("one"), "a");
            c.send(c.queue("two"), "b");
            Case.one(one);
            Case.one(two).acknowledge();
            session.close();
            Case.nothing(c.session().createConsumer(c.queue("one")));
            Case.nothing(c.session().createConsumer(c.queue("two")));
        });
        it("client.first-acknowledged-also-takes-the-later", c -> {
            Session session = c.connect().createSession(Session.CLIENT_ACKNOWLEDGE);
            MessageConsumer consumer = session.createConsumer(c.queue());
            c.send(c.queue(), "0", "1");
            Message first = Case.one(consumer);
            Case.one(consumer);
            first.acknowledge();
            session.close();
            Case.nothing(c.session().createConsumer(c.queue()));
        });
        it("client.what-comes-after-the-acknowledgement-is-not-taken", c -> {
            Session session = c.connect().createSession(Session.CLIENT_ACKNOWLEDGE);
            MessageConsumer consumer = session.createConsumer(c.queue());
            c.send(c.queue(), "0", "1");
            Case.one(consumer).acknowledge();
            Case.one(consumer);
            session.close();
            Case.getsJust(c.session().createConsumer(c.queue()), "1");
        });
        it("client.acknowledge-after-the-consumer-is-closed", c -> {
            Session session = c.connect().createSession(Session.CLIENT_ACKNOWLEDGE);
            MessageConsumer consumer = session.createConsumer(c.queue());
            c.send(c.queue(), "x");
            Message got = Case.one(consumer);
            consumer.close();
            got.acknowledge();
            session.close();
            Case.nothing(c.session().createConsumer(c.queue()));
        });
        it("client.acknowledge-after-the-session-is-closed-fails", c -> {
            Session session = c.session(Session.CLIENT_ACKNOWLEDGE);
            c.send(c.queue(), "x");
            Message got = Case.one(session.createConsumer(c.queue()));
            session.close();
            Check.fails(jakarta.jms.IllegalStateException.class, got::acknowledge);
            again(c.session().createConsumer(c.queue()), "x", 2);
        });
        it("client.acknowledge-after-the-connection-is-closed-fails", c -> {
            Connection other = c.connect();
            c.send(c.queue(), "x");
            Message got = Case.one(other.createSession(Session.CLIENT_ACKNOWLEDGE).createConsumer(c.queue()));
            other.close();
            Check.fails(jakarta.jms.IllegalStateException.class, got::acknowledge);
        });
        it("individual.acknowledges-one-alone", c -> {
            Session session = c.connect().createSession(INDIVIDUAL);
            MessageConsumer consumer = session.createConsumer(c.queue());
            c.send(c.queue(), "0", "1", "2");
            Case.one(consumer);
            Case.one(consumer).acknowledge();
            Case.one(consumer);
            session.close();
            Case.getsJust(c.session().createConsumer(c.queue()), "0", "2");
        });
        it("individual.in-any-order", c -> {
            Session session = c.connect().createSession(INDIVIDUAL);
            MessageConsumer consumer = session.createConsumer(c.queue());
            c.send(c.queue(), Case.numbers(0, 6));
            List<Message> got = new ArrayList<>();
            for (int i = 0; i < 6; i++) got.add(Case.one(consumer));
            for (int i : new int[] {5, 0, 3}) got.get(i).acknowledge();
            session.close();
            Case.getsJust(c.session().createConsumer(c.queue()), "1", "2", "4");
        });
        it("individual.unacknowledged-comes-again", c -> {
            Session session = c.connect().createSession(INDIVIDUAL);
            c.send(c.queue(), "x");
            Case.one(session.createConsumer(c.queue()));
            session.close(); // the client does not say what the application has seen, so the message need not be marked
            Case.getsJust(c.session().createConsumer(c.queue()), "x");
        });
        it("client.many-unacknowledged", c -> {
            Session session = c.connect().createSession(Session.CLIENT_ACKNOWLEDGE);
            MessageConsumer consumer = session.createConsumer(c.queue());
            c.sendNumbered(c.queue(), 1500); // more than a prefetch
            Message last = null;
            for (int i = 0; i < 1500; i++) last = Case.one(consumer);
            last.acknowledge();
            session.close();
            Case.nothing(c.session().createConsumer(c.queue()));
        });
        it("acknowledge.mode-is-told", c -> {
            Check.equal(Session.AUTO_ACKNOWLEDGE, c.session().getAcknowledgeMode());
            Check.equal(Session.CLIENT_ACKNOWLEDGE, c.session(Session.CLIENT_ACKNOWLEDGE).getAcknowledgeMode());
            Check.equal(Session.SESSION_TRANSACTED, c.session(Session.SESSION_TRANSACTED).getAcknowledgeMode());
            Check.that(c.session(Session.SESSION_TRANSACTED).getTransacted(), "transacted");
        });
    }

    static Message again(MessageConsumer consumer, String body, int count) throws JMSException {
        Message got = Case.one(consumer);
        Check.equal(body, Case.textOf(got));
        Check.that(got.getJMSRedelivered(), "marked as redelivered");
        Check.equal(count, got.getIntProperty("JMSXDeliveryCount"));
        return got;
    }

    void recovering() {
        it("recover.starts-again-with-the-first-unacknowledged", c -> {
            Session session = c.session(Session.CLIENT_ACKNOWLEDGE);
            MessageConsumer consumer = session.createConsumer(c.queue());
            c.send(c.queue(), "0", "1", "2");
            Case.gets(consumer, "0", "1");
            session.recover();
            again(consumer, "0", 2);
            again(consumer, "1", 2);
            Message last = Case.one(consumer);
            Check.equal("2", Case.textOf(last));
            Check.that(!last.getJMSRedelivered(), "the third was not delivered before");
        });
        it("recover.leaves-acknowledged-alone", c -> {
            Session session = c.session(Session.CLIENT_ACKNOWLEDGE);
            MessageConsumer consumer = session.createConsumer(c.queue());
            c.send(c.queue(), "0", "1");
            Case.one(consumer).acknowledge();
            Case.one(consumer);
            session.recover();
            again(consumer, "1", 2);
            Case.nothing(consumer);
        });
        it("recover.counts", c -> {
            Session session = c.session(Session.CLIENT_ACKNOWLEDGE);
            MessageConsumer consumer = session.createConsumer(c.queue());
            c.send(c.queue(), "x");
            Case.one(consumer);
            for (int count = 2; count < 5; count++) {
                session.recover();
                again(consumer, "x", count);
            }
        });
        it("recover.gives-the-original-though-it-was-changed", c -> {
            Session session = c.session(Session.CLIENT_ACKNOWLEDGE);
            MessageConsumer consumer = session.createConsumer(c.queue());
            c.send(c.queue(), "x");
            TextMessage got = (TextMessage) Case.one(consumer);
            got.clearBody();
            got.setText("changed");
            session.recover();
            again(consumer, "x", 2);
        });
        it("recover.of-a-transacted-session-fails", c ->
                Check.fails(jakarta.jms.IllegalStateException.class, () -> c.session(Session.SESSION_TRANSACTED).recover()));
        it("recover.keeps-the-order", c -> {
            Session session = c.session(Session.CLIENT_ACKNOWLEDGE);
            MessageConsumer consumer = session.createConsumer(c.queue());
            c.sendNumbered(c.queue(), 20);
            Case.gets(consumer, Case.numbers(0, 7));
            session.recover();
            Case.gets(consumer, Case.numbers(0, 20));
        });
        it("redelivery.keeps-the-message-id", c -> {
            c.send(c.queue(), "x");
            Connection other = c.connect();
            String id = Case.one(other.createSession(Session.CLIENT_ACKNOWLEDGE).createConsumer(c.queue())).getJMSMessageID();
            other.close();
            Check.equal(id, again(c.session().createConsumer(c.queue()), "x", 2).getJMSMessageID());
        });
        it("redelivery.keeps-headers-and-properties", c -> {
            TextMessage sent = c.text("x");
            sent.setIntProperty("n", 7);
            sent.setJMSType("t");
            sent.setJMSCorrelationID("c");
            c.tools().createProducer(c.queue()).send(sent, DeliveryMode.PERSISTENT, 7, 60_000);
            Connection other = c.connect();
            Case.one(other.createSession(Session.CLIENT_ACKNOWLEDGE).createConsumer(c.queue()));
            other.close();
            Message got = again(c.session().createConsumer(c.queue()), "x", 2);
            Check.equal(List.of(7, "t", "c", 7, sent.getJMSExpiration(), sent.getJMSTimestamp()),
                    List.of(got.getIntProperty("n"), got.getJMSType(), got.getJMSCorrelationID(), got.getJMSPriority(),
                            got.getJMSExpiration(), got.getJMSTimestamp()));
        });
        it("redelivery.counts-each-time", c -> {
            c.send(c.queue(), "x");
            for (int count = 1; count <= 4; count++) {
                Connection other = c.connect();
                Message got = Case.one(other.createSession(Session.CLIENT_ACKNOWLEDGE).createConsumer(c.queue()));
                Check.equal(count, got.getIntProperty("JMSXDeliveryCount"));
                Check.equal(count > 1, got.getJMSRedelivered());
                other.close();
            }
        });
    }

    void poison() {
        it("poison.goes-to-the-dead-letter-queue", c -> {
            Session session = c.session(Session.SESSION_TRANSACTED);
            dead(c, c.queue(), session, session.createConsumer(c.queue()));
        });
        it("poison.of-a-durable-subscription", c -> {
            Session session = c.connectAs(c.name).createSession(Session.SESSION_TRANSACTED);
            dead(c, c.topic(), session, session.createDurableConsumer(c.topic(), "s"));
        });
        it("poison.does-not-hold-up-the-others", c -> {
            Session session = c.session(Session.SESSION_TRANSACTED);
            MessageConsumer consumer = session.createConsumer(c.queue());
            c.send(c.queue(), "poison", "good");
            for (int i = 0; i < DELIVERIES_MAX; i++) {
                Check.equal("poison", Case.textOf(Case.one(consumer)));
                session.rollback();
            }
            Case.gets(consumer, "good");
            session.commit();
        });
        it("poison.dead-letter-says-from-where", c -> {
            Message dead = deadLetter(c);
            Check.equal(c.name, Case.annotation(dead, "x-opt-ORIG-ADDRESS"));
            Check.equal(c.name, Case.annotation(dead, "x-opt-ORIG-QUEUE"));
        });
        it("poison.dead-letter-keeps-the-original", c -> {
            Message dead = deadLetter(c);
            Check.equal("poison", Case.textOf(dead));
            Check.equal(c.name, dead.getStringProperty("conformance"));
            Check.equal("t", dead.getJMSType());
        });
        it("poison.rejected-by-the-client-goes-at-once", c -> {
            // A client with a limit of zero redeliveries answers a redelivered message with modified, undeliverable-here.
            c.send(c.queue(), "x");
            Connection first = c.connect();
            Case.one(first.createSession(Session.CLIENT_ACKNOWLEDGE).createConsumer(c.queue()));
            first.close();
            MessageConsumer refusing = c.connect("jms.redeliveryPolicy.maxRedeliveries=0", "jms.redeliveryPolicy.outcome=REJECTED")
                    .createSession().createConsumer(c.queue());
            Case.silence(refusing);
            Case.nothing(c.session().createConsumer(c.queue()));
        });
    }

    /** A message that was rolled back as often as allowed is no longer delivered to its consumer. */
    static void dead(Case c, Destination to, Session session, MessageConsumer consumer) throws JMSException {
        TextMessage message = c.text("poison");
        message.setStringProperty("conformance", c.name);
        message.setJMSType("t");
        c.tools().createProducer(to).send(message);
        for (int i = 1; i <= DELIVERIES_MAX; i++) {
            Message got = Case.one(consumer);
            Check.equal(i, got.getIntProperty("JMSXDeliveryCount"));
            session.rollback();
        }
        Case.nothing(consumer);
    }

    static Message deadLetter(Case c) throws JMSException {
        Session session = c.session(Session.SESSION_TRANSACTED);
        dead(c, c.queue(), session, session.createConsumer(c.queue()));
        return Case.one(c.session().createConsumer(c.tools().createQueue("DLQ"), "conformance = '" + c.name + "'"));
    }
}
