import jakarta.jms.*;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.concurrent.atomic.AtomicInteger;

/** Large numbers and sizes: large messages, many messages, many links. */
final class Large extends Suite {
    static final int MIB = 1 << 20;

    Large() {
        bytesOf("large.message-of-1-mib", MIB);
        bytesOf("large.message-of-16-mib", 16 * MIB);
        bytesOf("large.message-of-60-mib", 60 * MIB);
        alone("large.text-of-4-mi-characters", 30, c -> {
            String text = "żółć".repeat(MIB);
            Check.equal(text, c.through(c.text(text)).getText());
        });
        alone("large.messages-in-a-transaction", 30, c -> {
            Session session = c.session(Session.SESSION_TRANSACTED);
            MessageProducer producer = session.createProducer(c.queue());
            for (int i = 0; i < 8; i++) producer.send(random(session, MIB, i));
            session.commit();
            MessageConsumer consumer = session.createConsumer(c.queue());
            for (int i = 0; i < 8; i++) Check.equal(content(MIB, i), Case.one(consumer).getBody(byte[].class));
            session.rollback();
            for (int i = 0; i < 8; i++) Check.equal((long) MIB, ((BytesMessage) Case.one(consumer)).getBodyLength());
            session.commit();
        });
        alone("large.message-to-a-topic-with-ten-subscribers", 30, c -> {
            List<MessageConsumer> consumers = new ArrayList<>();
            for (int i = 0; i < 10; i++) consumers.add(c.session().createConsumer(c.topic()));
            c.tools().createProducer(c.topic()).send(random(c.tools(), MIB, 0));
            for (MessageConsumer each : consumers) Check.equal((long) MIB, ((BytesMessage) Case.one(each)).getBodyLength());
        });
        alone("large.small-messages-pass-between-large-ones", 30, c -> {
            MessageProducer large = c.tools().createProducer(c.queue("large"));
            for (int i = 0; i < 4; i++) {
                large.send(random(c.tools(), 4 * MIB, i));
                c.send(c.queue("small"), "" + i);
            }
            Case.getsJust(c.session().createConsumer(c.queue("small")), Case.numbers(0, 4));
            MessageConsumer consumer = c.session().createConsumer(c.queue("large"));
            for (int i = 0; i < 4; i++) Check.equal(4L * MIB, ((BytesMessage) Case.one(consumer)).getBodyLength());
        });
        alone("many.messages-through-a-queue", 60, c -> {
            c.sendNumbered(c.queue(), 10_000);
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 10_000));
        });
        alone("many.producers-and-consumers-of-a-session", 60, c -> {
            Session session = c.session();
            List<MessageConsumer> consumers = new ArrayList<>();
            for (int i = 0; i < 300; i++) consumers.add(session.createConsumer(c.queue("" + i)));
            for (int i = 0; i < 300; i++) {
                MessageProducer producer = session.createProducer(c.queue("" + i));
                producer.send(session.createTextMessage("" + i), DeliveryMode.NON_PERSISTENT, 4, 0);
            }
            for (int i = 0; i < 300; i++) Case.gets(consumers.get(i), "" + i);
        });
        alone("many.listeners-share-a-backlog", 60, c -> {
            c.sendNumbered(c.queue(), 2000);
            AtomicInteger got = new AtomicInteger();
            for (int i = 0; i < 8; i++) {
                MessageConsumer consumer = c.connect("jms.prefetchPolicy.all=20").createSession().createConsumer(c.queue());
                consumer.setMessageListener(message -> got.incrementAndGet());
            }
            Case.until("2000 messages", () -> got.get() >= 2000);
            Check.equal(2000, got.get());
        });
        alone("many.durable-subscriptions", 60, c -> {
            Session session = c.connectAs(c.name).createSession();
            for (int i = 0; i < 100; i++) session.createDurableConsumer(c.topic(), "s" + i).close();
            c.send(c.topic(), "x");
            for (int i = 0; i < 100; i++) {
                try (MessageConsumer consumer = session.createDurableConsumer(c.topic(), "s" + i)) {
                    Case.gets(consumer, "x");
                }
                session.unsubscribe("s" + i);
            }
        });
    }

    void bytesOf(String id, int size) {
        alone(id, 60, c -> {
            BytesMessage sent = random(c.tools(), size, 1);
            c.tools().createProducer(c.queue()).send(sent);
            Message got = c.session().createConsumer(c.queue()).receive(40_000);
            Check.that(got != null && java.util.Arrays.equals(content(size, 1), got.getBody(byte[].class)), "the message as it was sent");
        });
    }

    static BytesMessage random(Session session, int size, int seed) throws JMSException {
        BytesMessage message = session.createBytesMessage();
        message.writeBytes(content(size, seed));
        return message;
    }

    static byte[] content(int size, int seed) {
        byte[] out = new byte[size];
        new Random(seed).nextBytes(out);
        return out;
    }
}
