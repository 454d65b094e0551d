import jakarta.jms.*;
import jakarta.jms.IllegalStateException;
import java.io.BufferedReader;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.locks.LockSupport;
import java.util.stream.Collectors;
import org.apache.qpid.jms.JmsConnection;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.apache.qpid.jms.JmsConnectionListener;
import org.apache.qpid.jms.message.JmsInboundMessageDispatch;

/**
 * Clients that keep working through crashes of their broker, and record what they observe for a checker.
 *
 * <pre>java -cp JARS java/Storm.java --url 'failover:(amqp://127.0.0.1:5672)' --history FILE
 *     --clients 'send:orders send-tx:orders move:orders>moved take:moved' [--rate 0] [--batch 10] [--name storm] [--resend false]
 *     [--quiet-s 5]</pre>
 *
 * Roles: send:TO (one persistent message at a time), send-tx:TO (transactions of --batch messages), move:FROM>TO (receive and send in one
 * transaction), take:FROM (receive, in transactions of up to --batch). A destination is the name of a queue, or topic:NAME with a durable subscription.
 * --rate is the number of messages per second of each sender. With --resend true, a transaction in doubt is sent again, with the same _AMQ_DUPL_ID.
 *
 * A message's id is its text and its property storm_id. The history has one JSON line per operation: {"t": ms since the epoch, "client", "op",
 * "from", "to", "ids", "redelivered" (ids), "outcome": ok | fail | indeterminate, "error"}. Sends also have their start, and receives from a topic
 * their subscription. A broken connection makes an operation indeterminate, never failed. Standard output has {"event": "ready"} and, last,
 * {"event": "end"} with the counts of outcomes. Senders stop when standard input says "stop-senders", "stop" or ends; {"event": "senders-ended"}
 * confirms this. The others stop after "stop" or the end of the input, once they have received nothing for --quiet-s.
 */
public final class Storm {
    /**
     * Qpid JMS also reports a commit whose answer was lost as rolled back. Only this text means that the connection broke before the commit, so that
     * the broker was not asked to store anything.
     */
    static final String SURELY_ROLLED_BACK = "Transaction failed and has been rolled back.";
    /** Pause after a failure: while the connection is down, every commit fails immediately. */
    static final long PAUSE_MS = 50;

    enum Outcome { ok, fail, indeterminate }

    interface Role {
        boolean work(Client client) throws Exception;
    }

    static final Map<String, Role> ROLES = Map.of("send", Client::send, "send-tx", Client::sendTransaction, "move", Client::take, "take", Client::take);

    final Map<String, String> options = new HashMap<>();
    final PrintStream history;
    final Map<Outcome, AtomicInteger> outcomes = new HashMap<>();
    volatile boolean stopping, sendersStopping;

    public static void main(String[] arguments) throws Exception {
        new Storm(arguments).run();
    }

    Storm(String[] arguments) throws Exception {
        for (int i = 0; i + 1 < arguments.length; i += 2) options.put(arguments[i].substring(2), arguments[i + 1]);
        for (Outcome each : Outcome.values()) outcomes.put(each, new AtomicInteger());
        history = new PrintStream(new FileOutputStream(options.get("history"), true), false, StandardCharsets.UTF_8);
    }

    void run() throws Exception {
        List<Client> clients = new ArrayList<>();
        for (String each : options.get("clients").split(" ")) clients.add(new Client(each, options.getOrDefault("name", "storm") + "-" + clients.size()));
        System.out.println("{\"event\":\"ready\"}");
        System.out.flush();
        for (Client each : clients) each.start();
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        String line = "";
        while (line != null && !line.startsWith("stop")) line = input.readLine();
        sendersStopping = true;
        for (Client each : clients) if (each.sender) each.join();
        System.out.println("{\"event\":\"senders-ended\"}");
        System.out.flush();
        while (line != null && !line.equals("stop")) line = input.readLine();
        stopping = true;
        for (Client each : clients) each.join();
        System.out.println("{\"event\":\"end\"," + outcomes.entrySet().stream().map(each -> "\"" + each.getKey() + "\":" + each.getValue())
                .collect(Collectors.joining(",")) + "}");
        System.out.flush();
        System.exit(0);
    }

    final class Client extends Thread implements JmsConnectionListener {
        final String name, from, to;
        final Role role;
        final boolean transacted, sender, resend = Boolean.parseBoolean(options.get("resend"));
        final int batch = number("batch", 10), rate = number("rate", 0);
        final String subscription;
        volatile boolean connected;
        long begun;
        JmsConnection connection;
        Session session;
        MessageConsumer consumer;
        MessageProducer producer;
        int next;

        Client(String text, String name) throws JMSException {
            super(name);
            this.name = name;
            String[] parts = text.split(":", 2), route = parts[1].split(">");
            role = ROLES.get(parts[0]);
            sender = parts[0].startsWith("send");
            transacted = !parts[0].equals("send");
            from = sender ? null : route[0];
            to = sender ? route[0] : route.length > 1 ? route[1] : null;
            subscription = from != null && from.startsWith("topic:") ? name + ".storm" : null;
            open();
            if (subscription != null) operation("subscribe", List.of(), List.of(), Outcome.ok, null);
        }

        void open() throws JMSException {
            connection = (JmsConnection) new JmsConnectionFactory(options.get("url")).createConnection();
            connection.setClientID(name);
            connection.addConnectionListener(this);
            session = connection.createSession(transacted ? Session.SESSION_TRANSACTED : Session.AUTO_ACKNOWLEDGE);
            if (to != null) producer = session.createProducer(destination(to));
            if (from != null) {
                consumer = destination(from) instanceof Topic topic ? session.createDurableConsumer(topic, "storm") : session.createConsumer(destination(from));
            }
            connection.start();
            connected = true;
        }

        Destination destination(String text) throws JMSException {
            return text.startsWith("topic:") ? session.createTopic(text.substring(6)) : session.createQueue(text);
        }

        @Override
        public void run() {
            long quiet = TimeUnit.SECONDS.toNanos(number("quiet-s", 5)), lastWork = System.nanoTime(), due = lastWork;
            while (sender ? !sendersStopping : !stopping || !connected || System.nanoTime() - lastWork < quiet) {
                try {
                    if (role.work(this) || !stopping || !connected) lastWork = System.nanoTime();
                    if (sender && rate > 0) LockSupport.parkNanos((due += TimeUnit.SECONDS.toNanos(transacted ? batch : 1) / rate) - System.nanoTime());
                } catch (IllegalStateException closed) {
                    reopen(closed);
                } catch (Exception error) {
                    event("error", error);
                    LockSupport.parkNanos(TimeUnit.MILLISECONDS.toNanos(PAUSE_MS));
                }
            }
            try {
                connection.close();
            } catch (JMSException error) {
                event("error", error);
            }
        }

        /** The broker, or failover, closed the session; an application would also start over. */
        void reopen(Exception cause) {
            event("reopen", cause);
            try {
                connection.close();
                open();
            } catch (JMSException error) {
                event("error", error);
                LockSupport.parkNanos(TimeUnit.MILLISECONDS.toNanos(PAUSE_MS));
            }
        }

        boolean send() throws JMSException {
            List<String> ids = newIds(1);
            begun = System.currentTimeMillis();
            try {
                producer.send(message(ids.get(0)));
                operation("send", ids, List.of(), Outcome.ok, null);
            } catch (JMSException error) {
                operation("send", ids, List.of(), rejected(error) ? Outcome.fail : Outcome.indeterminate, error);
                if (error instanceof IllegalStateException) throw error;
            }
            return true;
        }

        boolean sendTransaction() throws Exception {
            List<String> ids = newIds(batch);
            begun = System.currentTimeMillis();
            for (boolean doubtful = false; ; ) {
                try {
                    for (String id : ids) producer.send(message(id));
                    session.commit();
                    operation("send", ids, List.of(), Outcome.ok, null);
                    return true;
                } catch (JMSException error) {
                    abandon();
                    boolean stored = doubtful && isDuplicate(error);
                    doubtful |= !surelyRolledBack(error);
                    if (!resend || stored || sendersStopping || error instanceof IllegalStateException) {
                        operation("send", ids, List.of(), stored ? Outcome.ok : doubtful ? Outcome.indeterminate : Outcome.fail, error);
                        if (error instanceof IllegalStateException) throw error;
                        return true;
                    }
                }
            }
        }

        /** Receives up to a batch and, for a move, forwards it, in one transaction. */
        boolean take() throws Exception {
            List<String> ids = new ArrayList<>(), redelivered = new ArrayList<>();
            try {
                for (Message message; ids.size() < batch && (message = consumer.receive(200)) != null; ) {
                    ids.add(message.getStringProperty("storm_id"));
                    if (message.getJMSRedelivered()) redelivered.add(message.getStringProperty("storm_id"));
                    if (to != null) producer.send(message(message.getStringProperty("storm_id")));
                }
                if (ids.isEmpty()) return false;
                session.commit();
                operation("receive", ids, redelivered, Outcome.ok, null);
            } catch (JMSException error) {
                abandon();
                operation("receive", ids, redelivered, surelyRolledBack(error) ? Outcome.fail : Outcome.indeterminate, error);
                if (error instanceof IllegalStateException) throw error;
            }
            return true;
        }

        /**
         * Messages that a failed transaction still holds must not be committed with the next one, so a failed rollback is repeated. Until a
         * rollback has succeeded, Qpid JMS delivers no messages to the consumers of the session.
         */
        void abandon() throws InterruptedException {
            for (boolean over = false; !over; Thread.sleep(PAUSE_MS)) {
                try {
                    session.rollback();
                    over = true;
                } catch (JMSException error) {
                    event("error", error);
                    over = consumer == null || error instanceof IllegalStateException;
                }
            }
        }

        List<String> newIds(int count) {
            List<String> ids = new ArrayList<>();
            for (int i = 0; i < count; i++) ids.add(name + "-" + next++);
            return ids;
        }

        Message message(String id) throws JMSException {
            TextMessage message = session.createTextMessage(id);
            message.setStringProperty("storm_id", id);
            if (resend && sender) message.setStringProperty("_AMQ_DUPL_ID", id);
            return message;
        }

        void operation(String kind, List<String> ids, List<String> redelivered, Outcome outcome, Exception error) {
            outcomes.get(outcome).addAndGet(ids.size());
            write("\"op\":\"" + (from != null && to != null ? "move" : kind) + "\"" + field("from", from) + field("to", to)
                    + field("subscription", subscription) + (sender ? ",\"begun\":" + begun : "") + ",\"ids\":" + array(ids)
                    + ",\"redelivered\":" + array(redelivered) + ",\"outcome\":\"" + outcome + "\"" + field("error", error));
        }

        void event(String event, Object error) {
            write("\"event\":\"" + event + "\"" + field("error", error));
        }

        void write(String fields) {
            String line = "{\"t\":" + System.currentTimeMillis() + ",\"client\":\"" + name + "\"," + fields + "}\n";
            synchronized (history) {
                history.print(line);
                history.flush();
            }
        }

        @Override public void onConnectionInterrupted(URI uri) {
            connected = false;
            event("interrupted", null);
        }

        @Override public void onConnectionRestored(URI uri) {
            connected = true;
            event("restored", null);
        }

        @Override public void onConnectionFailure(Throwable cause) { event("failed", cause); }
        @Override public void onConnectionEstablished(URI uri) {}
        @Override public void onInboundMessage(JmsInboundMessageDispatch envelope) {}
        @Override public void onSessionClosed(Session closed, Throwable cause) { event("session-closed", cause); }
        @Override public void onConsumerClosed(MessageConsumer closed, Throwable cause) { event("consumer-closed", cause); }
        @Override public void onProducerClosed(MessageProducer closed, Throwable cause) { event("producer-closed", cause); }
    }

    /** Returns whether the broker rejected the message. After any other error, the message may have been stored. */
    static boolean rejected(JMSException error) {
        return error instanceof ResourceAllocationException || error instanceof InvalidDestinationException || error instanceof JMSSecurityException;
    }

    /** Returns whether Artemis refuses the commit because it repeats a message: an earlier attempt had then stored the transaction. */
    static boolean isDuplicate(JMSException error) {
        return error.getMessage() != null && error.getMessage().toLowerCase().contains("duplicate");
    }

    static boolean surelyRolledBack(JMSException error) {
        return error instanceof TransactionRolledBackException && SURELY_ROLLED_BACK.equals(error.getMessage());
    }

    static String array(List<String> ids) {
        return ids.isEmpty() ? "[]" : "[\"" + String.join("\",\"", ids) + "\"]";
    }

    static String field(String name, Object value) {
        return value == null ? "" : ",\"" + name + "\":\"" + value.toString().replaceAll("[\"\\\\\\p{Cntrl}]", " ") + '"';
    }

    int number(String option, int otherwise) {
        return options.containsKey(option) ? Integer.parseInt(options.get(option)) : otherwise;
    }
}
