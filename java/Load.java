import jakarta.jms.*;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.BitSet;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.locks.LockSupport;
import org.apache.qpid.jms.JmsConnectionFactory;

/**
 * A load client: producers and consumers, each with its own connection, at full speed or at a fixed rate.
 *
 * <pre>java -cp JARS java/Load.java --url amqp://127.0.0.1:5672 --to queue:load [--producers 1] [--consumers 1] [--size 1024]
 *     [--persistent true] [--send sync|async|tx] [--batch 100] [--window 1000] [--rate 0] [--warmup-s 3] [--seconds 10]</pre>
 *
 * With --send tx, producers and consumers use transacted sessions of --batch messages. --rate is the number of messages per second of all
 * producers; the latency then counts from the time when a message was due, so that a stall counts for all messages that it delayed. At full
 * speed, the latency includes the wait in the queue. The program prints one JSON line at the end: rates and latencies of the measured time, and
 * losses, duplicates and disorder of all messages.
 */
public final class Load {
    static final int WARM_UP = 0, MEASURED = 1, OVER = 2;
    /** A consumer that receives nothing for so long after the last send waits for a lost message. */
    static final long QUIET_NS = TimeUnit.SECONDS.toNanos(5);

    final Map<String, String> options = new HashMap<>();
    final String url, send;
    final boolean topic, persistent;
    final int producers, consumers, size, batch, window;
    final double rate;
    final Counts sent = new Counts(), received = new Counts();
    final List<Arrivals> arrivals = new ArrayList<>();
    final List<Throwable> failures = new ArrayList<>();
    volatile int phase = WARM_UP;
    /** Total number of messages to receive; unknown while producers run. */
    volatile long total = Long.MAX_VALUE;

    public static void main(String[] arguments) throws Exception {
        new Load(arguments).run();
    }

    Load(String[] arguments) {
        for (int i = 0; i + 1 < arguments.length; i += 2) options.put(arguments[i].substring(2), arguments[i + 1]);
        url = options.get("url");
        topic = options.get("to").startsWith("topic:");
        persistent = Boolean.parseBoolean(options.getOrDefault("persistent", "true"));
        send = options.getOrDefault("send", "sync");
        producers = number("producers", 1);
        consumers = number("consumers", 1);
        size = number("size", 1024);
        batch = number("batch", 100);
        window = number("window", 1000);
        rate = number("rate", 0);
    }

    int number(String option, int otherwise) {
        return options.containsKey(option) ? Integer.parseInt(options.get(option)) : otherwise;
    }

    void run() throws Exception {
        // The consumers of a queue share the messages; each subscriber of a topic must receive all of them.
        for (int i = 0; i < (topic ? consumers : 1); i++) arrivals.add(new Arrivals(producers));
        List<Consumer> takers = new ArrayList<>();
        List<Producer> givers = new ArrayList<>();
        for (int i = 0; i < consumers; i++) takers.add(new Consumer(arrivals.get(topic ? i : 0)));
        for (int i = 0; i < producers; i++) givers.add(new Producer(i));
        for (Thread each : takers) each.start();
        for (Thread each : givers) each.start();
        TimeUnit.SECONDS.sleep(number("warmup-s", 3));
        phase = MEASURED;
        long began = System.nanoTime();
        TimeUnit.SECONDS.sleep(number("seconds", 10));
        phase = OVER;
        double seconds = (System.nanoTime() - began) / 1e9;
        for (Thread each : givers) each.join();
        total = givers.stream().mapToLong(each -> each.sequence).sum();
        for (Thread each : takers) each.join();
        report(seconds);
        System.exit(failures.isEmpty() ? 0 : 1); // open connections are dropped: closing them is not measured
    }

    void report(double seconds) {
        long lost = 0, duplicated = 0, disordered = 0;
        for (Arrivals each : arrivals) {
            lost += total - each.distinct();
            duplicated += each.duplicated;
            disordered += each.disordered.get();
        }
        for (Throwable failure : failures) failure.printStackTrace();
        System.out.printf(Locale.ROOT, "{\"sent_per_s\":%.1f,\"received_per_s\":%.1f,\"send_p50_ms\":%.3f,\"send_p99_ms\":%.3f,\"end_p50_ms\":%.3f,"
                + "\"end_p99_ms\":%.3f,\"sent\":%d,\"lost\":%d,\"duplicated\":%d,\"disordered\":%d,\"failures\":%d,\"seconds\":%.3f}%n",
                sent.messages / seconds, received.messages / seconds, sent.latency.quantile_ms(0.5), sent.latency.quantile_ms(0.99),
                received.latency.quantile_ms(0.5), received.latency.quantile_ms(0.99), total, lost, duplicated, disordered, failures.size(), seconds);
    }

    Destination destination(Session session) throws JMSException {
        String name = options.get("to").split(":", 2)[1];
        return topic ? session.createTopic(name) : session.createQueue(name);
    }

    /** A thread with a connection and a session. An exception of the thread ends the run as a failure. */
    abstract class Client extends Thread {
        final Session session;

        Client() throws JMSException {
            Connection connection = new JmsConnectionFactory(url).createConnection();
            session = connection.createSession(send.equals("tx") ? Session.SESSION_TRANSACTED : Session.AUTO_ACKNOWLEDGE);
            connection.start();
        }

        @Override
        public void run() {
            try {
                work();
            } catch (Exception error) {
                synchronized (failures) {
                    failures.add(error);
                }
            }
        }

        abstract void work() throws Exception;
    }

    final class Producer extends Client {
        final int number;
        final MessageProducer producer;
        final Counts counts = new Counts();
        final Semaphore free = new Semaphore(window);
        final byte[] filling = new byte[Math.max(0, size - 20)];
        int sequence;

        Producer(int number) throws JMSException {
            this.number = number;
            producer = session.createProducer(destination(session));
            producer.setDeliveryMode(persistent ? DeliveryMode.PERSISTENT : DeliveryMode.NON_PERSISTENT);
        }

        @Override
        void work() throws Exception {
            long due = System.nanoTime(), interval = rate == 0 ? 0 : (long) (1e9 * producers / rate);
            while (phase != OVER) {
                if (interval == 0) due = System.nanoTime();
                else while (System.nanoTime() < due) LockSupport.parkNanos(due - System.nanoTime());
                switch (send) {
                    case "sync" -> sendSync(due);
                    case "async" -> sendAsync(due);
                    case "tx" -> sendBatch(due);
                    default -> throw new IllegalArgumentException("--send " + send);
                }
                due += interval * (send.equals("tx") ? batch : 1);
            }
            free.acquire(window); // all completions have arrived
            sent.add(counts);
        }

        void sendSync(long due) throws JMSException {
            producer.send(message(due));
            if (phase == MEASURED) counts.add(1, System.nanoTime() - due);
        }

        void sendAsync(long due) throws Exception {
            free.acquire();
            producer.send(message(due), new CompletionListener() {
                @Override
                public void onCompletion(Message message) { // always on the connection's only thread
                    if (phase == MEASURED) counts.add(1, System.nanoTime() - due);
                    free.release();
                }

                @Override
                public void onException(Message message, Exception error) {
                    synchronized (failures) {
                        failures.add(error);
                    }
                    free.release();
                }
            });
        }

        void sendBatch(long due) throws JMSException {
            for (int i = 0; i < batch; i++) producer.send(message(due));
            session.commit();
            if (phase == MEASURED) counts.add(batch, System.nanoTime() - due);
        }

        Message message(long due) throws JMSException {
            BytesMessage message = session.createBytesMessage();
            message.writeLong(due);
            message.writeInt(number);
            message.writeInt(sequence++);
            message.writeBytes(filling);
            return message;
        }
    }

    final class Consumer extends Client {
        final MessageConsumer consumer;
        final Arrivals into;
        final Counts counts = new Counts();
        final int[] last = new int[producers];

        Consumer(Arrivals into) throws JMSException {
            this.into = into;
            consumer = session.createConsumer(destination(session));
            Arrays.fill(last, -1);
        }

        @Override
        void work() throws Exception {
            boolean transacted = send.equals("tx");
            int uncommitted = 0;
            for (long idleSince = System.nanoTime(); ; ) {
                BytesMessage message = (BytesMessage) consumer.receive(100);
                if (message != null) {
                    take(message);
                    idleSince = System.nanoTime();
                    uncommitted++;
                } else if (into.distinct() >= total || total < Long.MAX_VALUE && System.nanoTime() - idleSince > QUIET_NS) {
                    break;
                }
                if (transacted && (uncommitted == batch || message == null && uncommitted > 0)) {
                    session.commit();
                    uncommitted = 0;
                }
            }
            received.add(counts);
        }

        void take(BytesMessage message) throws JMSException {
            long due = message.readLong();
            int producer = message.readInt(), sequence = message.readInt();
            if (phase == MEASURED) counts.add(1, System.nanoTime() - due);
            into.take(producer, sequence);
            if (sequence < last[producer]) into.disordered.incrementAndGet();
            last[producer] = sequence;
        }
    }

    /** The messages that have arrived, by producer and sequence. */
    static final class Arrivals {
        final BitSet[] seen;
        final AtomicInteger disordered = new AtomicInteger();
        long distinct, duplicated;

        Arrivals(int producers) {
            seen = new BitSet[producers];
            for (int i = 0; i < producers; i++) seen[i] = new BitSet();
        }

        synchronized void take(int producer, int sequence) {
            if (seen[producer].get(sequence)) duplicated++;
            else distinct++;
            seen[producer].set(sequence);
        }

        synchronized long distinct() {
            return distinct;
        }
    }

    /** Messages and their latencies, from one thread until they are added to another object. */
    static final class Counts {
        long messages;
        final Histogram latency = new Histogram();

        void add(int count, long latency_ns) {
            messages += count;
            latency.add(latency_ns);
        }

        synchronized void add(Counts other) {
            messages += other.messages;
            for (int i = 0; i < latency.counts.length; i++) latency.counts[i] += other.latency.counts[i];
        }
    }

    /** Logarithmic buckets, 32 to each power of two: any value within 3 %. */
    static final class Histogram {
        static final int BITS = 5;
        final long[] counts = new long[64 << BITS];

        void add(long value_ns) {
            long value = Math.max(value_ns, 1 << BITS);
            int exponent = 63 - Long.numberOfLeadingZeros(value);
            counts[(exponent << BITS) + (int) (value >>> (exponent - BITS)) - (1 << BITS)]++;
        }

        double quantile_ms(double quantile) {
            long total = 0, below = 0;
            for (long each : counts) total += each;
            for (int i = 0; i < counts.length; i++) {
                below += counts[i];
                if (total > 0 && below >= quantile * total) return ((1L << BITS) + (i & ((1 << BITS) - 1))) * Math.pow(2, (i >> BITS) - BITS) / 1e6;
            }
            return 0;
        }
    }
}
