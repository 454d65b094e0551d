import jakarta.jms.*;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Enumeration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.qpid.jms.JmsConnection;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.apache.qpid.jms.JmsConnectionListener;
import org.apache.qpid.jms.message.JmsInboundMessageDispatch;

/**
 * A JMS client that tests drive line by line: one JSON command per line of standard input, one JSON answer per line of standard output.
 *
 * <p>{"id": 7, "do": "send", "on": "p1", "thread": "s1", ...} is answered by {"id": 7, "ok": ...} or {"id": 7, "error": class, "message": ...,
 * "linked": [...]}. Objects (connections, sessions, ...) have the names that the caller gave ("as"). Commands of one "thread" run in order,
 * and those of different threads in parallel, as JMS requires for sessions. A typed value is plain JSON or a pair ["short", 3]; answers always give pairs.
 */
public final class Tool {
    interface Command {
        Object run(Map<String, Object> in) throws Exception;
    }

    /** Number of messages that are kept for a later acknowledge(); more would keep all traffic of a long session. */
    static final int KEPT_MESSAGES = 100_000;

    final Map<String, Object> objects = new ConcurrentHashMap<>();
    final Map<String, Destination> seenDestinations = new ConcurrentHashMap<>();
    final Map<String, BlockingQueue<Object>> collected = new ConcurrentHashMap<>();
    final Map<String, ExecutorService> threads = new ConcurrentHashMap<>();
    final Map<Long, Message> received = Collections.synchronizedMap(new LinkedHashMap<>() {
        @Override
        protected boolean removeEldestEntry(Map.Entry<Long, Message> eldest) {
            return size() > KEPT_MESSAGES;
        }
    });
    final AtomicLong tags = new AtomicLong();
    final PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    final Map<String, Command> commands = new LinkedHashMap<>();

    public static void main(String[] arguments) throws Exception {
        new Tool().serve();
    }

    void serve() throws Exception {
        defineCommands();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = lines.readLine()) != null; ) {
            Map<String, Object> in = Json.object(line);
            threads.computeIfAbsent(string(in, "thread", "main"), name -> Executors.newSingleThreadExecutor(task -> {
                Thread thread = new Thread(task, name);
                thread.setDaemon(true);
                return thread;
            })).execute(() -> answer(in));
        }
        System.exit(0); // the program that sends the commands has ended; connections end with it
    }

    void answer(Map<String, Object> in) {
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("id", in.get("id"));
        try {
            Command command = commands.get(string(in, "do", ""));
            if (command == null) throw new IllegalArgumentException("no command " + in.get("do") + "; there are " + commands.keySet());
            answer.put("ok", command.run(in));
        } catch (Throwable error) {
            answer.putAll(describe(error));
        }
        String line = Json.text(answer);
        synchronized (out) {
            out.println(line);
            out.flush();
        }
    }

    static Map<String, Object> describe(Throwable error) {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("error", error.getClass().getSimpleName());
        fields.put("message", error.getMessage());
        if (error instanceof JMSException jms) fields.put("code", jms.getErrorCode());
        List<Object> linked = new ArrayList<>();
        for (Throwable cause = error.getCause(); cause != null && linked.size() < 8; cause = cause.getCause()) {
            linked.add(cause.getClass().getSimpleName() + ": " + cause.getMessage());
        }
        fields.put("linked", linked);
        return fields;
    }

    // ---- commands ------------------------------------------------------------------------------------------------------------------

    void defineCommands() {
        commands.put("connect", this::connect);
        commands.put("start", in -> { on(in, Connection.class).start(); return null; });
        commands.put("stop", in -> { on(in, Connection.class).stop(); return null; });
        commands.put("close", in -> { ((AutoCloseable) on(in, Object.class)).close(); objects.remove(string(in, "on", "")); return null; });
        commands.put("metadata", this::metadata);
        commands.put("session", in -> put(in, on(in, Connection.class).createSession(MODES.get(string(in, "mode", "AUTO")))));
        commands.put("producer", in -> put(in, on(in, Session.class).createProducer(destination(on(in, Session.class), in.get("to")))));
        commands.put("consumer", in -> put(in, consumer(on(in, Session.class), in)));
        commands.put("temp_queue", in -> temporary(in, on(in, Session.class).createTemporaryQueue()));
        commands.put("temp_topic", in -> temporary(in, on(in, Session.class).createTemporaryTopic()));
        commands.put("delete", this::delete);
        commands.put("unsubscribe", in -> { on(in, Session.class).unsubscribe(string(in, "name", null)); return null; });
        commands.put("send", this::send);
        commands.put("send_async", this::sendAsync);
        commands.put("receive", this::receive);
        commands.put("listen", this::listen);
        commands.put("unlisten", in -> { on(in, MessageConsumer.class).setMessageListener(null); return null; });
        commands.put("collect", this::collect);
        commands.put("acknowledge", in -> { received.get(number(in, "tag", -1)).acknowledge(); return null; });
        commands.put("recover", in -> { on(in, Session.class).recover(); return null; });
        commands.put("commit", in -> { on(in, Session.class).commit(); return null; });
        commands.put("rollback", in -> { on(in, Session.class).rollback(); return null; });
        commands.put("browse", this::browse);
    }

    static final Map<String, Integer> MODES = Map.of(
            "AUTO", Session.AUTO_ACKNOWLEDGE, "CLIENT", Session.CLIENT_ACKNOWLEDGE, "DUPS_OK", Session.DUPS_OK_ACKNOWLEDGE,
            "TRANSACTED", Session.SESSION_TRANSACTED, "INDIVIDUAL", 101); // 101: Qpid JMS's extension

    Object connect(Map<String, Object> in) throws Exception {
        JmsConnectionFactory factory = new JmsConnectionFactory(string(in, "url", null));
        JmsConnection connection = (JmsConnection) (in.get("user") == null
                ? factory.createConnection() : factory.createConnection(string(in, "user", null), string(in, "password", null)));
        String name = string(in, "as", null);
        BlockingQueue<Object> events = collectedBy(name);
        connection.setExceptionListener(error -> events.add(describe(error)));
        connection.addConnectionListener(new Events(events));
        try {
            if (in.get("client_id") != null) connection.setClientID(string(in, "client_id", null));
            if (flag(in, "start", true)) connection.start();
        } catch (JMSException error) {
            connection.close();
            throw error;
        }
        objects.put(name, connection);
        return connection.getClientID();
    }

    Object metadata(Map<String, Object> in) throws JMSException {
        ConnectionMetaData data = on(in, Connection.class).getMetaData();
        List<Object> names = new ArrayList<>();
        for (Enumeration<?> each = data.getJMSXPropertyNames(); each.hasMoreElements(); ) names.add(each.nextElement());
        return Map.of("jms", data.getJMSVersion(), "provider", data.getJMSProviderName(), "version", data.getProviderVersion(), "jmsx", names);
    }

    MessageConsumer consumer(Session session, Map<String, Object> in) throws JMSException {
        Destination from = destination(session, in.get("from"));
        String selector = string(in, "selector", null);
        String name = string(in, "name", null);
        boolean noLocal = flag(in, "no_local", false);
        boolean durable = flag(in, "durable", false);
        if (flag(in, "shared", false)) {
            return durable ? session.createSharedDurableConsumer((Topic) from, name, selector) : session.createSharedConsumer((Topic) from, name, selector);
        }
        return durable ? session.createDurableConsumer((Topic) from, name, selector, noLocal) : session.createConsumer(from, selector, noLocal);
    }

    Object temporary(Map<String, Object> in, Destination made) throws JMSException {
        put(in, made);
        return name(made);
    }

    Object delete(Map<String, Object> in) throws JMSException {
        Destination made = on(in, Destination.class);
        if (made instanceof TemporaryQueue queue) queue.delete();
        else ((TemporaryTopic) made).delete();
        return null;
    }

    /** With "count", sends that many copies; {n} in texts becomes the number of the copy. Answers the (last) message id and timestamp. */
    Object send(Map<String, Object> in) throws JMSException {
        MessageProducer producer = on(in, MessageProducer.class);
        Session session = (Session) objects.get(string(in, "session", null));
        Message message = null;
        long count = number(in, "count", 1);
        for (long n = number(in, "first", 0), end = n + count; n < end; n++) {
            message = Messages.create(this, session, Json.map(in.get("message")), n);
            producer.setDeliveryDelay(number(in, "delay_ms", 0));
            int mode = flag(in, "persistent", true) ? DeliveryMode.PERSISTENT : DeliveryMode.NON_PERSISTENT;
            int priority = (int) number(in, "priority", Message.DEFAULT_PRIORITY);
            if (in.get("to") == null) producer.send(message, mode, priority, number(in, "ttl_ms", 0));
            else producer.send(destination(session, in.get("to")), message, mode, priority, number(in, "ttl_ms", 0));
        }
        return message == null ? null : Map.of("message_id", String.valueOf(message.getJMSMessageID()), "timestamp_ms", message.getJMSTimestamp());
    }

    /** Completions are collected under the name of the producer, in the order in which they arrive. */
    Object sendAsync(Map<String, Object> in) throws JMSException {
        MessageProducer producer = on(in, MessageProducer.class);
        BlockingQueue<Object> completions = collectedBy(string(in, "on", null));
        Session session = (Session) objects.get(string(in, "session", null));
        producer.setDeliveryMode(flag(in, "persistent", true) ? DeliveryMode.PERSISTENT : DeliveryMode.NON_PERSISTENT);
        for (long n = number(in, "first", 0), end = n + number(in, "count", 1); n < end; n++) {
            long number = n;
            producer.send(Messages.create(this, session, Json.map(in.get("message")), n), new CompletionListener() {
                @Override public void onCompletion(Message message) { completions.add(Map.of("n", number)); }
                @Override public void onException(Message message, Exception error) {
                    Map<String, Object> failure = describe(error);
                    failure.put("n", number);
                    completions.add(failure);
                }
            });
        }
        return null;
    }

    /** Up to "count" messages; "timeout_ms" bounds the wait for each (0: receiveNoWait). */
    Object receive(Map<String, Object> in) throws JMSException {
        MessageConsumer consumer = on(in, MessageConsumer.class);
        List<Object> messages = new ArrayList<>();
        long timeout = number(in, "timeout_ms", 0);
        for (long count = number(in, "count", 1); messages.size() < count; ) {
            Message message = timeout == 0 ? consumer.receiveNoWait() : consumer.receive(timeout);
            if (message == null) break;
            messages.add(Messages.describe(this, message));
        }
        return messages;
    }

    /** Messages are collected under the consumer's name; the first "fail_first" deliveries throw, "acknowledge" calls acknowledge(). */
    Object listen(Map<String, Object> in) throws JMSException {
        BlockingQueue<Object> messages = collectedBy(string(in, "on", null));
        AtomicInteger failures = new AtomicInteger((int) number(in, "fail_first", 0));
        boolean acknowledge = flag(in, "acknowledge", false);
        on(in, MessageConsumer.class).setMessageListener(message -> {
            try {
                messages.add(Messages.describe(this, message));
                if (failures.getAndDecrement() > 0) throw new RuntimeException("a listener that fails on purpose");
                if (acknowledge) message.acknowledge();
            } catch (JMSException error) {
                messages.add(describe(error));
            }
        });
        return null;
    }

    /**
     * Returns what was collected under a name (messages, completions, events of a connection): waits for "count" entries, and returns all.
     */
    Object collect(Map<String, Object> in) throws InterruptedException {
        BlockingQueue<Object> queue = collectedBy(string(in, "on", null));
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(number(in, "timeout_ms", 0));
        List<Object> taken = new ArrayList<>();
        for (long count = number(in, "count", 0); taken.size() < count; ) {
            Object next = queue.poll(deadline - System.nanoTime(), TimeUnit.NANOSECONDS);
            if (next == null) break;
            taken.add(next);
        }
        queue.drainTo(taken);
        return taken;
    }

    Object browse(Map<String, Object> in) throws JMSException {
        Session session = on(in, Session.class);
        List<Object> messages = new ArrayList<>();
        try (QueueBrowser browser = session.createBrowser((Queue) destination(session, in.get("from")), string(in, "selector", null))) {
            for (Enumeration<?> each = browser.getEnumeration(); each.hasMoreElements(); ) {
                messages.add(Messages.describe(this, (Message) each.nextElement()));
            }
        }
        return messages;
    }

    // ---- objects and arguments ---------------------------------------------------------------------------------------------------

    Object put(Map<String, Object> in, Object made) {
        objects.put(string(in, "as", null), made);
        return null;
    }

    <T> T on(Map<String, Object> in, Class<T> type) {
        Object found = objects.get(string(in, "on", ""));
        if (!type.isInstance(found)) throw new IllegalArgumentException(in.get("on") + " is no " + type.getSimpleName());
        return type.cast(found);
    }

    BlockingQueue<Object> collectedBy(String name) {
        return collected.computeIfAbsent(name, unused -> new LinkedBlockingQueue<>());
    }

    /** Parses "queue:NAME", "topic:NAME", the name of an object, or the result of {@link #name} for a known destination. */
    Destination destination(Session session, Object text) throws JMSException {
        if (text == null) return null;
        String name = text.toString();
        if (objects.get(name) instanceof Destination made) return made;
        if (seenDestinations.containsKey(name)) return seenDestinations.get(name);
        if (name.startsWith("queue:")) return session.createQueue(name.substring(6));
        if (name.startsWith("topic:")) return session.createTopic(name.substring(6));
        throw new IllegalArgumentException("no destination " + name);
    }

    String name(Destination destination) throws JMSException {
        if (destination == null) return null;
        String kind = destination instanceof TemporaryQueue ? "temp-queue:" : destination instanceof TemporaryTopic ? "temp-topic:"
                : destination instanceof Queue ? "queue:" : "topic:";
        String name = kind + (destination instanceof Queue queue ? queue.getQueueName() : ((Topic) destination).getTopicName());
        seenDestinations.putIfAbsent(name, destination);
        return name;
    }

    static String string(Map<String, Object> in, String key, String otherwise) {
        return in.get(key) instanceof String text ? text : otherwise;
    }

    static long number(Map<String, Object> in, String key, long otherwise) {
        return in.get(key) instanceof Number number ? number.longValue() : otherwise;
    }

    static boolean flag(Map<String, Object> in, String key, boolean otherwise) {
        return in.get(key) instanceof Boolean flag ? flag : otherwise;
    }
}

/** Collects the events of a connection and its parts under the name of the connection. */
record Events(BlockingQueue<Object> events) implements JmsConnectionListener {
    void add(String name, Throwable cause) {
        Map<String, Object> fields = cause == null ? new LinkedHashMap<>() : Tool.describe(cause);
        fields.put("event", name);
        events.add(fields);
    }

    @Override public void onConnectionEstablished(URI uri) {}
    @Override public void onConnectionFailure(Throwable cause) { add("failed", cause); }
    @Override public void onConnectionInterrupted(URI uri) { add("interrupted", null); }
    @Override public void onConnectionRestored(URI uri) { add("restored", null); }
    @Override public void onInboundMessage(JmsInboundMessageDispatch envelope) {}
    @Override public void onSessionClosed(Session session, Throwable cause) { add("session-closed", cause); }
    @Override public void onConsumerClosed(MessageConsumer consumer, Throwable cause) { add("consumer-closed", cause); }
    @Override public void onProducerClosed(MessageProducer producer, Throwable cause) { add("producer-closed", cause); }
}
