import jakarta.jms.*;
import java.net.URI;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.qpid.jms.JmsConnection;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.apache.qpid.jms.JmsConnectionListener;
import org.apache.qpid.jms.message.JmsInboundMessageDispatch;

/**
 * Durable subscribers of a JMS topic, each in a transacted session, that count the messages they receive.
 *
 * <pre>java -cp JARS java/Alerts.java --url 'failover:(amqp://127.0.0.1:5672)' --expect 1458 [--topic alerts] [--subscribers 2]
 *     [--deadline-s 300] [--quiet-s 2] [--batch 100]</pre>
 *
 * Standard output has JSON lines: {"event": "ready"} when all subscriptions exist, progress, and per subscriber {"event": "done", "received",
 * "distinct", "duplicates", "in_doubt", "digest"}. The digest is the SHA-256 of the sorted airport ids, one per line. A subscriber ends when it has
 * the expected number and then nothing for --quiet-s (a duplicate would come late), or at the deadline.
 */
public final class Alerts {
    /**
     * The message of Qpid JMS if it knows that the commit was never sent. With any other "rolled back" message, the commit may be in doubt.
     */
    static final String SURELY_ROLLED_BACK = "Transaction failed and has been rolled back.";
    static final Pattern AIRPORT = Pattern.compile("\"faa\"\\s*:\\s*\"([^\"]+)\"");

    record Alert(String id, String airport) {}

    final Map<String, String> options = new HashMap<>();

    public static void main(String[] arguments) throws Exception {
        new Alerts(arguments).run();
    }

    Alerts(String[] arguments) {
        for (int i = 0; i + 1 < arguments.length; i += 2) options.put(arguments[i].substring(2), arguments[i + 1]);
    }

    void run() throws Exception {
        List<Subscriber> subscribers = new ArrayList<>();
        for (int i = 0; i < number("subscribers", 2); i++) subscribers.add(new Subscriber(i));
        print(Map.of("event", "\"ready\""));
        for (Subscriber each : subscribers) each.start();
        for (Subscriber each : subscribers) each.join();
        boolean complete = true;
        for (Subscriber each : subscribers) complete &= each.done();
        System.exit(complete ? 0 : 1);
    }

    final class Subscriber extends Thread {
        final String subscriber;
        final JmsConnection connection;
        final Session session;
        final MessageConsumer consumer;
        final AtomicInteger interruptions = new AtomicInteger();
        final Map<String, String> seen = new HashMap<>(); // id of the message: airport
        final Set<String> doubtful = new HashSet<>();
        int duplicates;
        Exception failure;

        Subscriber(int number) throws JMSException {
            subscriber = "alerts-" + number;
            connection = (JmsConnection) new JmsConnectionFactory(options.get("url")).createConnection();
            connection.setClientID(subscriber);
            connection.addConnectionListener(new Interruptions(interruptions));
            session = connection.createSession(Session.SESSION_TRANSACTED);
            consumer = session.createDurableConsumer(session.createTopic(options.getOrDefault("topic", "alerts")), "airports");
        }

        @Override
        public void run() {
            try (connection) {
                connection.start();
                long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(number("deadline-s", 300));
                long lastMessage = System.nanoTime(), quiet = TimeUnit.SECONDS.toNanos(number("quiet-s", 2)), reported = 0;
                while (System.nanoTime() < deadline && (seen.size() < number("expect", 0) || System.nanoTime() - lastMessage < quiet)) {
                    if (receiveBatch()) lastMessage = System.nanoTime();
                    if (System.nanoTime() - reported > TimeUnit.MILLISECONDS.toNanos(250)) {
                        reported = System.nanoTime();
                        print(fields("progress"));
                    }
                }
            } catch (Exception error) {
                failure = error;
            }
        }

        /** Returns whether a batch was received and its transaction ended, committed or not. */
        boolean receiveBatch() throws JMSException {
            int interruptionsBefore = interruptions.get(), size = number("batch", 100);
            List<Alert> batch = new ArrayList<>();
            for (Message message; batch.size() < size && (message = consumer.receive(200)) != null; ) batch.add(alert(message));
            if (batch.isEmpty()) return false;
            try {
                if (interruptions.get() != interruptionsBefore) {
                    session.rollback(); // some acknowledgements may have been sent on the lost connection
                    return true;
                }
                session.commit();
                for (Alert each : batch) take(each);
            } catch (TransactionRolledBackException error) {
                if (!SURELY_ROLLED_BACK.equals(error.getMessage())) {
                    for (Alert each : batch) {
                        take(each);
                        doubtful.add(each.id);
                    }
                }
            }
            return true;
        }

        /** A message whose first acknowledgement is in doubt may be redelivered once; any other message must not be. */
        void take(Alert alert) {
            if (seen.put(alert.id, alert.airport) != null && !doubtful.remove(alert.id)) duplicates++;
        }

        boolean done() throws Exception {
            if (failure != null) failure.printStackTrace();
            Map<String, Object> fields = fields("done");
            MessageDigest digest = MessageDigest.getInstance("SHA-256");
            for (String airport : new TreeSet<>(seen.values())) digest.update((airport + "\n").getBytes());
            fields.put("digest", '"' + HexFormat.of().formatHex(digest.digest()) + '"');
            print(fields);
            return failure == null && duplicates == 0 && seen.size() == number("expect", seen.size());
        }

        Map<String, Object> fields(String event) {
            Map<String, Object> fields = new LinkedHashMap<>();
            fields.put("event", '"' + event + '"');
            fields.put("subscriber", '"' + subscriber + '"');
            fields.put("received", seen.size() + duplicates);
            fields.put("distinct", seen.size());
            fields.put("duplicates", duplicates);
            fields.put("in_doubt", doubtful.size());
            return fields;
        }
    }

    /** Identifies a Kafka record by its coordinates, and a message that does not come from Kafka by its message id. */
    static Alert alert(Message message) throws JMSException {
        String text = message.getBody(String.class);
        Matcher airport = AIRPORT.matcher(text);
        String id = message.propertyExists("kafka_offset")
                ? message.getStringProperty("kafka_partition") + "/" + message.getStringProperty("kafka_offset") : message.getJMSMessageID();
        return new Alert(id, airport.find() ? airport.group(1) : text);
    }

    int number(String option, int otherwise) {
        return options.containsKey(option) ? Integer.parseInt(options.get(option)) : otherwise;
    }

    static synchronized void print(Map<String, Object> fields) {
        StringBuilder line = new StringBuilder();
        fields.forEach((name, value) -> line.append(line.isEmpty() ? "{" : ",").append('"').append(name).append("\":").append(value));
        System.out.println(line.append('}'));
        System.out.flush();
    }

    record Interruptions(AtomicInteger count) implements JmsConnectionListener {
        @Override public void onConnectionInterrupted(URI uri) { count.incrementAndGet(); }
        @Override public void onConnectionEstablished(URI uri) {}
        @Override public void onConnectionFailure(Throwable cause) {}
        @Override public void onConnectionRestored(URI uri) {}
        @Override public void onInboundMessage(JmsInboundMessageDispatch envelope) {}
        @Override public void onSessionClosed(Session session, Throwable cause) {}
        @Override public void onConsumerClosed(MessageConsumer consumer, Throwable cause) {}
        @Override public void onProducerClosed(MessageProducer producer, Throwable cause) {}
    }
}
