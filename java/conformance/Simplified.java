import jakarta.jms.*;
import java.io.Serializable;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.qpid.jms.JmsConnectionFactory;

/** The simplified API of JMS 2.0: JMSContext, JMSProducer, JMSConsumer. */
final class Simplified extends Suite {
    Simplified() {
        contexts();
        producers();
        consumers();
        acknowledging();
        subscriptions();
    }

    void contexts() {
        it("context.sends-and-receives", c -> {
            JMSContext context = c.context();
            context.createProducer().send(c.queue(), "x");
            Check.equal("x", context.createConsumer(c.queue()).receiveBody(String.class, Case.WAIT_MS));
        });
        it("context.starts-with-its-first-consumer", c -> {
            JMSContext context = c.context();
            c.send(c.queue(), "x");
            Check.that(context.getAutoStart(), "starts by itself");
            Check.equal("x", context.createConsumer(c.queue()).receiveBody(String.class, Case.WAIT_MS));
        });
        it("context.without-auto-start", c -> {
            JMSContext context = c.context();
            context.setAutoStart(false);
            c.send(c.queue(), "x");
            JMSConsumer consumer = context.createConsumer(c.queue());
            Check.none(consumer.receive(Case.SILENCE_MS));
            context.start();
            Check.equal("x", consumer.receiveBody(String.class, Case.WAIT_MS));
        });
        it("context.stop-and-start", c -> {
            JMSContext context = c.context();
            JMSConsumer consumer = context.createConsumer(c.queue());
            context.stop();
            c.send(c.queue(), "x");
            Check.none(consumer.receive(Case.SILENCE_MS));
            context.start();
            Check.equal("x", consumer.receiveBody(String.class, Case.WAIT_MS));
        });
        it("context.of-a-context-shares-the-connection", c -> {
            JMSContext one = c.keep(c.factory("jms.clientID=" + c.name).createContext());
            JMSContext two = one.createContext(JMSContext.CLIENT_ACKNOWLEDGE);
            Check.equal(c.name, two.getClientID());
            Check.equal(JMSContext.CLIENT_ACKNOWLEDGE, two.getSessionMode());
            one.close();
            two.createProducer().send(c.queue(), "x"); // the connection is closed with its last context
            two.close();
            Case.gets(c.session().createConsumer(c.queue()), "x");
        });
        it("context.client-id", c -> {
            JMSContext context = c.context();
            context.setClientID(c.name);
            Check.equal(c.name, context.getClientID());
            Check.fails(InvalidClientIDRuntimeException.class, () -> {
                JMSContext other = c.context();
                other.setClientID(c.name);
                other.start();
            });
        });
        it("context.metadata", c -> Check.that(c.context().getMetaData().getJMSMajorVersion() >= 2, "JMS 2 or later"));
        it("context.wrong-password", c ->
                Check.fails(JMSSecurityRuntimeException.class, () -> new JmsConnectionFactory(c.url).createContext(c.user(), "wrong")
                        .start()));
        it("context.closed", c -> {
            JMSContext context = c.context();
            context.close();
            context.close();
            Check.fails(IllegalStateRuntimeException.class, context::createTextMessage);
        });
        it("context.creates-each-kind-of-message", c -> {
            JMSContext context = c.context();
            List<Message> made = List.of(context.createMessage(), context.createTextMessage("x"), context.createBytesMessage(),
                    context.createMapMessage(),
                    context.createStreamMessage(), context.createObjectMessage("x"));
            JMSProducer producer = context.createProducer();
            for (Message each : made) producer.send(c.queue(), each);
            JMSConsumer consumer = context.createConsumer(c.queue());
            for (int i = 0; i < made.size(); i++) Check.that(consumer.receive(Case.WAIT_MS) != null, "message " + i);
        });
        it("context.temporary-queue", c -> {
            JMSContext context = c.context();
            TemporaryQueue queue = context.createTemporaryQueue();
            context.createProducer().send(queue, "x");
            Check.equal("x", context.createConsumer(queue).receiveBody(String.class, Case.WAIT_MS));
        });
        it("context.browser", c -> {
            JMSContext context = c.context();
            c.send(c.queue(), "x");
            Check.equal(1, Collections.list((java.util.Enumeration<?>) context.createBrowser(c.queue()).getEnumeration()).size());
        });
    }

    void producers() {
        it("producer-of-context.bodies", c -> {
            JMSProducer producer = c.context().createProducer();
            producer.send(c.queue(), "text").send(c.queue(), new byte[] {1, 2}).send(c.queue(), Map.of("a", 1))
                    .send(c.queue(), (Serializable) 7);
            JMSConsumer consumer = c.context().createConsumer(c.queue());
            Check.equal("text", consumer.receiveBody(String.class, Case.WAIT_MS));
            Check.equal(new byte[] {1, 2}, consumer.receiveBody(byte[].class, Case.WAIT_MS));
            Check.equal(1, consumer.receiveBody(Map.class, Case.WAIT_MS).get("a"));
            Check.equal(7, consumer.receiveBody(Integer.class, Case.WAIT_MS));
        });
        it("producer-of-context.null-bodies", c -> {
            JMSProducer producer = c.context().createProducer();
            producer.send(c.queue(), (String) null).send(c.queue(), (byte[]) null).send(c.queue(), (Map<String, Object>) null)
                    .send(c.queue(), (Serializable) null);
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            for (int i = 0; i < 4; i++) Check.none(Case.one(consumer).getBody(Object.class));
        });
        it("producer-of-context.options-and-properties", c -> {
            JMSProducer producer = c.context().createProducer().setPriority(8).setDeliveryMode(DeliveryMode.NON_PERSISTENT)
                    .setTimeToLive(60_000).setProperty("s", "x").setProperty("n", 7).setProperty("b", true)
                    .setJMSType("t").setJMSCorrelationID("c").setJMSReplyTo(c.queue("reply"));
            producer.send(c.queue(), "body");
            Message got = Case.one(c.session().createConsumer(c.queue()));
            Check.equal(List.of(8, DeliveryMode.NON_PERSISTENT, got.getJMSTimestamp() + 60_000),
                    List.of(got.getJMSPriority(), got.getJMSDeliveryMode(), got.getJMSExpiration()));
            Check.equal(List.of("x", 7, true), List.of(got.getStringProperty("s"), got.getIntProperty("n"), got.getBooleanProperty("b")));
            Check.equal(List.of("t", "c", c.queue("reply")), List.of(got.getJMSType(), got.getJMSCorrelationID(), got.getJMSReplyTo()));
        });
        it("producer-of-context.overrides-the-message", c -> {
            JMSContext context = c.context();
            TextMessage message = context.createTextMessage("x");
            message.setStringProperty("a", "message");
            message.setStringProperty("b", "message");
            message.setJMSType("message");
            context.createProducer().setProperty("a", "producer").setJMSType("producer").send(c.queue(), message);
            Message got = Case.one(c.session().createConsumer(c.queue()));
            Check.equal(List.of("producer", "message", "producer"),
                    List.of(got.getStringProperty("a"), got.getStringProperty("b"), got.getJMSType()));
        });
        it("producer-of-context.every-property-type", c -> {
            c.context().createProducer().setProperty("boolean", true).setProperty("byte", (byte) 1).setProperty("short", (short) 2)
                    .setProperty("int", 3).setProperty("long", 4L).setProperty("float", 5.5f).setProperty("double", 6.5)
                    .setProperty("string", "7").setProperty("object", (Object) 8)
                    .send(c.queue(), "x");
            Message got = Case.one(c.session().createConsumer(c.queue()));
            List<Object> values = new ArrayList<>();
            for (String name : List.of("boolean", "byte", "short", "int", "long", "float", "double", "string", "object")) {
                values.add(got.getObjectProperty(name));
            }
            Check.equal(List.of(true, (byte) 1, (short) 2, 3, 4L, 5.5f, 6.5, "7", 8), values);
        });
        it("producer-of-context.clear-properties", c -> {
            JMSProducer producer = c.context().createProducer().setProperty("a", 1);
            Check.equal(Set.of("a"), producer.getPropertyNames());
            producer.clearProperties().send(c.queue(), "x");
            Check.that(!Case.one(c.session().createConsumer(c.queue())).propertyExists("a"), "no property");
        });
        it("producer-of-context.delivery-delay", c -> {
            JMSContext context = c.context();
            JMSConsumer consumer = context.createConsumer(c.queue());
            long before = System.currentTimeMillis();
            context.createProducer().setDeliveryDelay(Delivery.DELAY_MS).send(c.queue(), "x");
            Message message = consumer.receiveNoWait();
            if (message == null) message = consumer.receive(Case.WAIT_MS);
            Check.that(Delivery.isTime(before), "it came before its time");
            Check.equal("x", Case.textOf(message));
        });
        it("producer-of-context.asynchronous", c -> {
            List<Message> completed = Collections.synchronizedList(new ArrayList<>());
            JMSProducer producer = c.context().createProducer().setAsync(new Delivery.Completions(completed));
            for (int i = 0; i < 10; i++) producer.send(c.queue(), "" + i);
            Case.until("10 completions", () -> completed.size() == 10);
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 10));
        });
        it("producer-of-context.wrong-values", c -> {
            JMSProducer producer = c.context().createProducer();
            Check.fails(JMSRuntimeException.class, () -> producer.setPriority(10));
            Check.fails(JMSRuntimeException.class, () -> producer.setDeliveryMode(7));
            Check.fails(InvalidDestinationRuntimeException.class, () -> producer.send(null, "x"));
            Check.fails(MessageFormatRuntimeException.class, () -> producer.setProperty("p", List.of()));
        });
        it("producer-of-context.to-several-destinations", c -> {
            JMSProducer producer = c.context().createProducer();
            producer.send(c.queue("one"), "1").send(c.queue("two"), "2");
            Case.getsJust(c.session().createConsumer(c.queue("one")), "1");
            Case.getsJust(c.session().createConsumer(c.queue("two")), "2");
        });
    }

    void consumers() {
        it("consumer-of-context.receive-body-of-wrong-type-leaves-the-message", c -> {
            JMSContext context = c.context();
            JMSConsumer consumer = context.createConsumer(c.queue());
            c.send(c.queue(), "x");
            Check.fails(MessageFormatRuntimeException.class, () -> consumer.receiveBody(Map.class, Case.WAIT_MS));
            Message got = consumer.receive(Case.WAIT_MS);
            Check.equal("x", Case.textOf(got));
            Check.that(!got.getJMSRedelivered(), "not redelivered");
        });
        it("consumer-of-context.receive-body-of-wrong-type-in-client-acknowledge", c -> wrongType(c, JMSContext.CLIENT_ACKNOWLEDGE));
        it("consumer-of-context.receive-body-of-wrong-type-in-a-transaction", c -> wrongType(c, JMSContext.SESSION_TRANSACTED));
        it("consumer-of-context.receive-body-no-wait", c -> {
            JMSConsumer consumer = c.context().createConsumer(c.queue());
            Check.none(consumer.receiveBodyNoWait(String.class));
            c.send(c.queue(), "x");
            Check.equal("x", consumer.receiveBodyNoWait(String.class));
        });
        it("consumer-of-context.receive-body-after-its-time", c ->
                Check.none(c.context().createConsumer(c.queue()).receiveBody(String.class, 50)));
        it("consumer-of-context.stream-body-is-refused", c -> {
            JMSContext context = c.context();
            StreamMessage message = context.createStreamMessage();
            message.writeInt(1);
            context.createProducer().send(c.queue(), message);
            JMSConsumer consumer = context.createConsumer(c.queue());
            Check.fails(MessageFormatRuntimeException.class, () -> consumer.receiveBody(Object.class, Case.WAIT_MS));
        });
        it("consumer-of-context.selector", c -> {
            JMSContext context = c.context();
            c.sendNumbered(c.queue(), 3);
            JMSConsumer consumer = context.createConsumer(c.queue(), "n = 1");
            Check.equal("n = 1", consumer.getMessageSelector());
            Check.equal("1", consumer.receiveBody(String.class, Case.WAIT_MS));
            Check.none(consumer.receiveNoWait());
        });
        it("consumer-of-context.wrong-selector", c ->
                Check.fails(InvalidSelectorRuntimeException.class, () -> c.context().createConsumer(c.queue(), "n = ")));
        it("consumer-of-context.listener", c -> {
            List<String> got = Collections.synchronizedList(new ArrayList<>());
            c.context().createConsumer(c.queue()).setMessageListener(message -> {
                try {
                    got.add(Case.textOf(message));
                } catch (JMSException error) {
                    got.add(error.toString());
                }
            });
            c.send(c.queue(), "0", "1");
            Case.until("two messages", () -> got.equals(List.of("0", "1")));
        });
        it("consumer-of-context.closed", c -> {
            JMSConsumer consumer = c.context().createConsumer(c.queue());
            consumer.close();
            consumer.close();
            Check.fails(IllegalStateRuntimeException.class, consumer::receiveNoWait);
        });
    }

    /** The message counts as delivered, and is redelivered when the application asks for it. */
    static void wrongType(Case c, int mode) throws JMSException {
        JMSContext context = c.context(mode);
        JMSConsumer consumer = context.createConsumer(c.queue());
        c.send(c.queue(), "0", "1");
        Check.fails(MessageFormatRuntimeException.class, () -> consumer.receiveBody(Map.class, Case.WAIT_MS));
        Check.equal("1", consumer.receiveBody(String.class, Case.WAIT_MS));
        if (mode == JMSContext.SESSION_TRANSACTED) context.rollback();
        else context.recover();
        Message again = consumer.receive(Case.WAIT_MS);
        Check.equal("0", Case.textOf(again));
        Check.that(again.getJMSRedelivered(), "marked as redelivered");
    }

    void acknowledging() {
        it("context.acknowledge-of-the-client", c -> {
            JMSContext context = c.context(JMSContext.CLIENT_ACKNOWLEDGE);
            c.send(c.queue(), "0", "1");
            JMSConsumer consumer = context.createConsumer(c.queue());
            consumer.receive(Case.WAIT_MS);
            context.acknowledge();
            consumer.receive(Case.WAIT_MS);
            context.close();
            Acknowledging.again(c.session().createConsumer(c.queue()), "1", 2);
        });
        it("context.recover", c -> {
            JMSContext context = c.context(JMSContext.CLIENT_ACKNOWLEDGE);
            c.send(c.queue(), "x");
            JMSConsumer consumer = context.createConsumer(c.queue());
            consumer.receive(Case.WAIT_MS);
            context.recover();
            Check.equal(2, consumer.receive(Case.WAIT_MS).getIntProperty("JMSXDeliveryCount"));
        });
        it("context.transacted", c -> {
            JMSContext context = c.context(JMSContext.SESSION_TRANSACTED);
            Check.that(context.getTransacted(), "transacted");
            context.createProducer().send(c.queue(), "lost");
            context.rollback();
            context.createProducer().send(c.queue(), "x");
            context.commit();
            Check.equal("x", context.createConsumer(c.queue()).receiveBody(String.class, Case.WAIT_MS));
            context.close();
            Acknowledging.again(c.session().createConsumer(c.queue()), "x", 2);
        });
        it("context.commit-without-a-transaction", c -> Check.fails(IllegalStateRuntimeException.class, () -> c.context().commit()));
        it("context.dups-ok", c -> {
            JMSContext context = c.context(JMSContext.DUPS_OK_ACKNOWLEDGE);
            c.send(c.queue(), "x");
            Check.equal("x", context.createConsumer(c.queue()).receiveBody(String.class, Case.WAIT_MS));
            context.close();
            Case.nothing(c.session().createConsumer(c.queue()));
        });
    }

    void subscriptions() {
        it("context.subscriber", c -> {
            JMSConsumer consumer = c.context().createConsumer(c.topic());
            c.send(c.topic(), "x");
            Check.equal("x", consumer.receiveBody(String.class, Case.WAIT_MS));
        });
        it("context.durable-consumer", c -> {
            JMSContext context = c.keep(c.factory("jms.clientID=" + c.name).createContext());
            context.createDurableConsumer(c.topic(), "s").close();
            c.send(c.topic(), "x");
            JMSConsumer consumer = context.createDurableConsumer(c.topic(), "s");
            Check.equal("x", consumer.receiveBody(String.class, Case.WAIT_MS));
            consumer.close();
            context.unsubscribe("s");
            Check.fails(InvalidDestinationRuntimeException.class, () -> context.unsubscribe("s"));
        });
        it("context.shared-consumer", c -> {
            JMSConsumer one = c.context().createSharedConsumer(c.topic(), c.name);
            JMSConsumer two = c.context().createSharedConsumer(c.topic(), c.name);
            c.send(c.topic(), "x");
            Message first = one.receive(Case.SILENCE_MS), second = two.receive(Case.SILENCE_MS);
            Check.that((first == null) != (second == null), "one of the two got it");
        });
        it("context.shared-durable-consumer", c -> {
            JMSContext context = c.context();
            context.createSharedDurableConsumer(c.topic(), c.name).close();
            c.send(c.topic(), "x");
            Check.equal("x", context.createSharedDurableConsumer(c.topic(), c.name).receiveBody(String.class, Case.WAIT_MS));
        });
        it("context.no-local", c -> {
            JMSContext context = c.context();
            JMSConsumer consumer = context.createConsumer(c.topic(), null, true);
            context.createProducer().send(c.topic(), "own");
            c.send(c.topic(), "other");
            Check.equal("other", consumer.receiveBody(String.class, Case.WAIT_MS));
        });
        it("context.durable-without-client-id", c ->
                Check.fails(IllegalStateRuntimeException.class, () -> c.context().createDurableConsumer(c.topic(), "s")));
    }
}
