import jakarta.jms.*;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.apache.qpid.jms.message.JmsMessage;

/** The resources of a case: connections, which are closed after the case, and destinations that no other case uses. */
final class Case implements AutoCloseable {
    /** Time limit for an expected message. It takes milliseconds; the limit allows for other work of the machine. */
    static final long WAIT_MS = 15_000;
    /** How long to wait for a message that must not come, if the broker cannot be asked. */
    static final long SILENCE_MS = 200;

    final String url, name;
    private final Map<String, String> options;
    private final Deque<AutoCloseable> opened = new ArrayDeque<>();
    private Connection connection;
    private Session tools;

    Case(Map<String, String> options, String name) {
        this.options = options;
        this.name = name;
        url = options.get("url");
    }

    // -- connections

    JmsConnectionFactory factory(String... parameters) {
        JmsConnectionFactory factory = new JmsConnectionFactory(url + (parameters.length > 0 ? "?" + String.join("&", parameters) : ""));
        if (options.containsKey("user")) {
            factory.setUsername(options.get("user"));
            factory.setPassword(options.get("password"));
        }
        factory.setCloseTimeout(40_000);
        factory.setConnectTimeout(40_000);
        factory.setRequestTimeout(40_000);
        factory.setSendTimeout(40_000);
        return factory;
    }

    /** Another connection, started. Parameters are those of the client's URL: "jms.prefetchPolicy.all=1". */
    Connection connect(String... parameters) throws JMSException {
        Connection made = keep(factory(parameters).createConnection());
        made.start();
        return made;
    }

    Connection connectAs(String clientId) throws JMSException {
        Connection made = keep(factory().createConnection());
        made.setClientID(clientId);
        made.start();
        return made;
    }

    JMSContext context(int mode, String... parameters) {
        return keep(factory(parameters).createContext(mode));
    }

    JMSContext context() {
        return context(JMSContext.AUTO_ACKNOWLEDGE);
    }

    /** Returns the first connection of the case. */
    synchronized Connection connection() throws JMSException {
        if (connection == null) connection = connect();
        return connection;
    }

    Session session() throws JMSException {
        return session(Session.AUTO_ACKNOWLEDGE);
    }

    Session session(int mode) throws JMSException {
        return connection().createSession(mode);
    }

    /** Returns a session of the case's connection, for actions that do not need their own session. */
    Session tools() throws JMSException {
        if (tools == null) tools = session();
        return tools;
    }

    String user() {
        return options.get("user");
    }

    synchronized <T extends AutoCloseable> T keep(T resource) {
        opened.push(resource);
        return resource;
    }

    @Override
    public synchronized void close() {
        while (!opened.isEmpty()) {
            try {
                opened.pop().close();
            } catch (Exception alreadyGone) {
                continue;
            }
        }
    }

    // -- destinations

    Queue queue() throws JMSException {
        return tools().createQueue(name);
    }

    Queue queue(String suffix) throws JMSException {
        return tools().createQueue(name + "." + suffix);
    }

    Topic topic() throws JMSException {
        return tools().createTopic(name);
    }

    Topic topic(String suffix) throws JMSException {
        return tools().createTopic(name + "." + suffix);
    }

    // -- messages

    TextMessage text(String body) throws JMSException {
        return tools().createTextMessage(body);
    }

    void send(Destination to, String... bodies) throws JMSException {
        send(tools(), to, bodies);
    }

    static void send(Session session, Destination to, String... bodies) throws JMSException {
        try (MessageProducer producer = session.createProducer(to)) {
            for (String each : bodies) producer.send(session.createTextMessage(each));
        }
    }

    /** Sends one text for each property value, fast. */
    void sendNumbered(Destination to, int count) throws JMSException {
        try (MessageProducer producer = tools().createProducer(to)) {
            producer.setDeliveryMode(DeliveryMode.NON_PERSISTENT);
            for (int i = 0; i < count; i++) {
                TextMessage message = text(String.valueOf(i));
                message.setIntProperty("n", i);
                producer.send(message);
            }
        }
    }

    /** Sends a message, and returns it as a consumer receives it. */
    @SuppressWarnings("unchecked")
    <T extends Message> T through(T message) throws JMSException {
        Queue queue = queue();
        try (MessageProducer producer = tools().createProducer(queue); MessageConsumer consumer = tools().createConsumer(queue)) {
            producer.send(message);
            return (T) one(consumer);
        }
    }

    /** Receives the next message. */
    static Message one(MessageConsumer consumer) throws JMSException {
        Message message = consumer.receive(WAIT_MS);
        if (message == null) throw new Check.Failed("no message within " + WAIT_MS + " ms");
        return message;
    }

    static String textOf(Message message) throws JMSException {
        return message == null ? null : message.getBody(String.class);
    }

    /** Checks the next texts. */
    static void gets(MessageConsumer consumer, String... expected) throws JMSException {
        List<String> got = new ArrayList<>();
        for (int i = 0; i < expected.length; i++) {
            Message message = consumer.receive(WAIT_MS);
            if (message == null) break;
            got.add(textOf(message));
        }
        Check.equal(List.of(expected), got);
    }

    /** Checks the next texts, and that there are no more messages. */
    static void getsJust(MessageConsumer consumer, String... expected) throws JMSException {
        gets(consumer, expected);
        nothing(consumer);
    }

    /** Checks that there is no message: the client asks the broker (drain). */
    static void nothing(MessageConsumer consumer) throws JMSException {
        Check.none(textOf(consumer.receiveNoWait()));
    }

    /** Checks that no message comes for a while. */
    static void silence(MessageConsumer consumer) throws JMSException {
        Check.none(textOf(consumer.receive(SILENCE_MS)));
    }

    /** Returns the texts "0", "1", ... */
    static String[] numbers(int first, int end) {
        String[] out = new String[end - first];
        for (int i = first; i < end; i++) out[i - first] = String.valueOf(i);
        return out;
    }

    /** Returns an AMQP message annotation, which JMS does not show. */
    static Object annotation(Message message, String key) {
        return ((JmsMessage) message).getFacade().getTracingAnnotation(key);
    }

    /** Waits until a condition is true. */
    static void until(String what, Callable<Boolean> condition) throws Exception {
        long deadline = System.nanoTime() + WAIT_MS * 1_000_000;
        while (!condition.call()) {
            if (System.nanoTime() > deadline) throw new Check.Failed("waited " + WAIT_MS + " ms for " + what);
            Thread.sleep(5);
        }
    }
}
