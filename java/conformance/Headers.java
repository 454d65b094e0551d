import jakarta.jms.*;
import java.nio.charset.StandardCharsets;
import java.util.HashSet;
import java.util.Set;

/** Header fields: those that the sender's provider sets, those that the application sets, and those that arrive. */
final class Headers extends Suite {
    Headers() {
        destinations();
        ids();
        correlation();
        others();
        priorities();
        jmsx();
    }

    void destinations() {
        it("header.destination-queue", c -> Check.equal(c.queue(), c.through(c.text("x")).getJMSDestination()));
        it("header.destination-topic", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.topic());
            c.send(c.topic(), "x");
            Check.equal(c.topic(), Case.one(consumer).getJMSDestination());
        });
        it("header.destination-after-the-send", c -> {
            Message message = c.text("x");
            message.setJMSDestination(c.queue("other"));
            c.tools().createProducer(c.queue()).send(message);
            Check.equal(c.queue(), message.getJMSDestination());
        });
        it("header.destination-temporary", c -> {
            TemporaryQueue queue = c.tools().createTemporaryQueue();
            c.send(queue, "x");
            Check.equal(queue, Case.one(c.session().createConsumer(queue)).getJMSDestination());
        });
        it("header.reply-to-queue", c -> replyTo(c, c.queue("reply")));
        it("header.reply-to-topic", c -> replyTo(c, c.topic("reply")));
        it("header.reply-to-temporary-queue", c -> replyTo(c, c.tools().createTemporaryQueue()));
        it("header.reply-to-temporary-topic", c -> replyTo(c, c.tools().createTemporaryTopic()));
        it("header.reply-to-none", c -> Check.none(c.through(c.text("x")).getJMSReplyTo()));
    }

    static void replyTo(Case c, Destination to) throws JMSException {
        Message message = c.text("x");
        message.setJMSReplyTo(to);
        Check.equal(to, c.through(message).getJMSReplyTo());
    }

    void ids() {
        it("header.message-id-begins-with-id", c ->
                Check.that(c.through(c.text("x")).getJMSMessageID().startsWith("ID:"), "an id that begins with ID:"));
        it("header.message-id-is-the-senders", c -> {
            Message message = c.text("x");
            message.setJMSMessageID("ID:mine");
            Message got = c.through(message);
            Check.that(!"ID:mine".equals(got.getJMSMessageID()), "what the application set is overwritten");
            Check.equal(message.getJMSMessageID(), got.getJMSMessageID());
        });
        it("header.message-ids-differ", c -> {
            Set<String> ids = new HashSet<>();
            c.sendNumbered(c.queue(), 200);
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            for (int i = 0; i < 200; i++) ids.add(Case.one(consumer).getJMSMessageID());
            Check.equal(200, ids.size());
        });
        it("header.message-id-disabled", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.setDisableMessageID(true);
            producer.send(c.text("x"));
            Check.none(Case.one(c.session().createConsumer(c.queue())).getJMSMessageID());
        });
        it("header.message-id-types-of-amqp", c -> {
            for (String type : new String[] {"UUID", "UUID_STRING", "PREFIXED_UUID_STRING"}) {
                Session session = c.connect("jms.messageIDPolicy.messageIDType=" + type).createSession();
                Message message = session.createTextMessage("x");
                session.createProducer(c.queue(type)).send(message);
                Check.equal(message.getJMSMessageID(), Case.one(session.createConsumer(c.queue(type))).getJMSMessageID());
            }
        });
        it("header.timestamp-is-the-time-of-the-send", c -> {
            Message message = c.text("x");
            message.setJMSTimestamp(5);
            long before = System.currentTimeMillis();
            Message got = c.through(message);
            Check.that(before <= got.getJMSTimestamp() && got.getJMSTimestamp() <= System.currentTimeMillis(), "a time within the send");
            Check.equal(message.getJMSTimestamp(), got.getJMSTimestamp());
        });
        it("header.timestamp-disabled", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.setDisableMessageTimestamp(true);
            producer.send(c.text("x"));
            Check.equal(0L, Case.one(c.session().createConsumer(c.queue())).getJMSTimestamp());
        });
    }

    void correlation() {
        it("header.correlation-id-of-the-application", c -> correlationId(c, "order 4711"));
        it("header.correlation-id-that-is-a-message-id", c -> {
            Message first = c.through(c.text("x"));
            correlationId(c, first.getJMSMessageID());
        });
        it("header.correlation-id-none", c -> Check.none(c.through(c.text("x")).getJMSCorrelationID()));
        it("header.correlation-id-uuid-of-amqp", c -> correlationId(c, "ID:AMQP_UUID:5b01be4e-4a3b-4c2f-8d4d-1f2e3a4b5c6d"));
        it("header.correlation-id-ulong-of-amqp", c -> correlationId(c, "ID:AMQP_ULONG:18446744073709551615"));
        it("header.correlation-id-binary-of-amqp", c -> correlationId(c, "ID:AMQP_BINARY:00FF10"));
        it("header.correlation-id-bytes", c -> {
            byte[] id = "żółć".getBytes(StandardCharsets.UTF_8);
            Message message = c.text("x");
            message.setJMSCorrelationIDAsBytes(id);
            Check.equal(id, c.through(message).getJMSCorrelationIDAsBytes());
        });
        it("header.correlation-id-empty", c -> correlationId(c, ""));
    }

    static void correlationId(Case c, String id) throws JMSException {
        Message message = c.text("x");
        message.setJMSCorrelationID(id);
        Check.equal(id, c.through(message).getJMSCorrelationID());
    }

    void others() {
        it("header.type", c -> {
            Message message = c.text("x");
            message.setJMSType("car");
            Check.equal("car", c.through(message).getJMSType());
        });
        it("header.type-none", c -> Check.none(c.through(c.text("x")).getJMSType()));
        it("header.delivery-mode-persistent-by-default", c ->
                Check.equal(DeliveryMode.PERSISTENT, c.through(c.text("x")).getJMSDeliveryMode()));
        it("header.delivery-mode-of-the-producer", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.setDeliveryMode(DeliveryMode.NON_PERSISTENT);
            Message message = c.text("x");
            message.setJMSDeliveryMode(DeliveryMode.PERSISTENT);
            producer.send(message);
            Check.equal(DeliveryMode.NON_PERSISTENT, message.getJMSDeliveryMode());
            Check.equal(DeliveryMode.NON_PERSISTENT, Case.one(c.session().createConsumer(c.queue())).getJMSDeliveryMode());
        });
        it("header.delivery-mode-of-the-send", c -> {
            c.tools().createProducer(c.queue()).send(c.text("x"), DeliveryMode.NON_PERSISTENT, 4, 0);
            Check.equal(DeliveryMode.NON_PERSISTENT, Case.one(c.session().createConsumer(c.queue())).getJMSDeliveryMode());
        });
        it("header.expiration-none", c -> Check.equal(0L, c.through(c.text("x")).getJMSExpiration()));
        it("header.expiration-is-timestamp-and-time-to-live", c -> {
            Message message = c.text("x");
            c.tools().createProducer(c.queue()).send(message, DeliveryMode.PERSISTENT, 4, 60_000);
            Message got = Case.one(c.session().createConsumer(c.queue()));
            Check.equal(got.getJMSTimestamp() + 60_000, got.getJMSExpiration());
            Check.equal(message.getJMSExpiration(), got.getJMSExpiration());
        });
        it("header.expiration-set-on-the-message-is-ignored", c -> {
            Message message = c.text("x");
            message.setJMSExpiration(1);
            Check.equal(0L, c.through(message).getJMSExpiration());
        });
        it("header.time-to-live-of-amqp-alone", c -> {
            Message message = c.text("x");
            message.setLongProperty("JMS_AMQP_TTL", 60_000);
            Message got = c.through(message);
            Check.that(got.getJMSExpiration() > System.currentTimeMillis(), "an expiration, made from the header's ttl");
        });
        it("header.delivery-time-without-a-delay", c -> {
            Message got = c.through(c.text("x"));
            Check.that(Math.abs(got.getJMSDeliveryTime() - got.getJMSTimestamp()) < 5000, "about the time of the send");
        });
        it("header.not-redelivered-at-first", c -> {
            Message got = c.through(c.text("x"));
            Check.that(!got.getJMSRedelivered(), "not redelivered");
            Check.equal(1, got.getIntProperty("JMSXDeliveryCount"));
        });
        it("header.redelivered-set-by-the-sender-has-no-effect", c -> {
            Message message = c.text("x");
            message.setJMSRedelivered(true);
            Message got = c.through(message);
            Check.that(!got.getJMSRedelivered(), "not redelivered");
            Check.equal(1, got.getIntProperty("JMSXDeliveryCount"));
        });
        it("header.can-be-changed-on-a-received-message", c -> {
            Message got = c.through(c.text("x"));
            got.setJMSType("other");
            got.setJMSCorrelationID("other");
            got.setJMSReplyTo(c.queue());
            Check.equal("other", got.getJMSType());
        });
        it("header.of-a-message-without-any", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.setDisableMessageID(true);
            producer.setDisableMessageTimestamp(true);
            producer.send(c.tools().createMessage(), DeliveryMode.NON_PERSISTENT, 4, 0);
            Message got = Case.one(c.session().createConsumer(c.queue()));
            Check.none(got.getJMSCorrelationID());
            Check.equal(4, got.getJMSPriority());
        });
    }

    void priorities() {
        it("header.priority-default", c -> Check.equal(4, c.through(c.text("x")).getJMSPriority()));
        it("header.priority-every", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            for (int priority = 0; priority <= 9; priority++) {
                producer.send(c.text("x"), DeliveryMode.NON_PERSISTENT, priority, 0);
                Check.equal(priority, Case.one(consumer).getJMSPriority());
            }
        });
        it("header.priority-set-on-the-message-is-ignored", c -> {
            Message message = c.text("x");
            message.setJMSPriority(9);
            Check.equal(4, c.through(message).getJMSPriority());
        });
        it("header.priority-of-the-producer", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.setPriority(7);
            producer.send(c.text("x"));
            Check.equal(7, Case.one(c.session().createConsumer(c.queue())).getJMSPriority());
        });
        it("header.priority-out-of-range", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            Check.fails(JMSException.class, () -> producer.setPriority(10));
            Check.fails(JMSException.class, () -> producer.setPriority(-1));
        });
    }

    void jmsx() {
        it("jmsx.group-id-and-sequence", c -> {
            Message message = c.text("x");
            message.setStringProperty("JMSXGroupID", "g");
            message.setIntProperty("JMSXGroupSeq", 3);
            Message got = c.through(message);
            Check.equal("g", got.getStringProperty("JMSXGroupID"));
            Check.equal(3, got.getIntProperty("JMSXGroupSeq"));
        });
        it("jmsx.user-id-where-the-client-is-told-to-set-it", c -> {
            Session session = c.connect("jms.populateJMSXUserID=true").createSession();
            session.createProducer(c.queue()).send(session.createTextMessage("x"));
            Check.equal(c.user(), Case.one(session.createConsumer(c.queue())).getStringProperty("JMSXUserID"));
        });
        it("jmsx.user-id-not-forged", c -> {
            Message message = c.text("x");
            message.setStringProperty("JMSXUserID", "somebody else");
            Session session = c.connect("jms.populateJMSXUserID=true").createSession();
            session.createProducer(c.queue()).send(message);
            Check.equal(c.user(), Case.one(session.createConsumer(c.queue())).getStringProperty("JMSXUserID"));
        });
        it("jmsx.delivery-count-is-there", c ->
                Check.that(c.through(c.text("x")).propertyExists("JMSXDeliveryCount"), "JMSXDeliveryCount exists"));
        it("jmsx.names-that-the-connection-supports", c -> {
            Set<Object> names = new HashSet<>(java.util.Collections.list((java.util.Enumeration<?>) c.connection().getMetaData()
                    .getJMSXPropertyNames()));
            Check.that(names.containsAll(Set.of("JMSXDeliveryCount", "JMSXGroupID", "JMSXGroupSeq")), "the mandatory names, got " + names);
        });
        it("jmsx.reply-to-group-id-of-amqp", c -> {
            Message message = c.text("x");
            message.setStringProperty("JMS_AMQP_REPLY_TO_GROUP_ID", "g");
            Check.equal("g", c.through(message).getStringProperty("JMS_AMQP_REPLY_TO_GROUP_ID"));
        });
    }
}
