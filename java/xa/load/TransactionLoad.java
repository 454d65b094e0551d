package bascule.load;

import com.arjuna.ats.arjuna.common.CoreEnvironmentBean;
import com.arjuna.ats.arjuna.common.ObjectStoreEnvironmentBean;
import com.arjuna.common.internal.util.propertyservice.BeanPopulator;
import com.sun.management.OperatingSystemMXBean;
import jakarta.jms.Connection;
import jakarta.jms.JMSException;
import jakarta.jms.MessageProducer;
import jakarta.jms.Session;
import jakarta.jms.XAConnection;
import jakarta.transaction.TransactionManager;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;

/**
 * Transactions of Narayana over JMS and PostgreSQL, at full speed, each thread with its own connections.
 *
 * <pre>TransactionLoad --broker artemis|bascule --url URL --jdbc URL --log DIRECTORY --resources jms,postgres --receive true|false
 *     --queue NAME --seeds 0 --size 200 --threads 1 --warmup-s 2 --seconds 5</pre>
 *
 * A transaction receives a message of the queue (with --receive), inserts a row, and sends a message to the queue. The queue begins with
 * --seeds messages. One JSON line at the end: transactions per second, and the latency of one; of all transactions, also of those before
 * --warmup-s, the number and the processor time of this process.
 */
public final class TransactionLoad {
    private static final String NODE = "load";
    private static final PrintStream OUTPUT = System.out;

    private TransactionLoad() {}

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err); // libraries print there
        Options options = new Options(arguments);
        TransactionManager manager = narayana(options.text("log"));
        int threads = options.number("threads");
        CyclicBarrier ready = new CyclicBarrier(threads + 1);
        List<Worker> workers = new ArrayList<>();
        for (int i = 0; i < threads; i++) {
            workers.add(new Worker(options, manager, ready));
        }
        seed(options); // started after all consumers exist: a client may prefetch all messages
        workers.forEach(Worker::start);
        ready.await();
        long cpuNanos = cpuNanos();
        long from = System.nanoTime() + options.nanos("warmup-s");
        workers.forEach(each -> each.endAt(from + options.nanos("seconds")));
        for (Worker each : workers) {
            each.join();
        }
        report(workers, from, options.nanos("seconds"), cpuNanos() - cpuNanos);
        // Open connections are dropped: closing them is not what is measured. Narayana has threads that are no daemons.
        System.exit(workers.stream().anyMatch(each -> each.failure() != null) ? 1 : 0);
    }

    /** Starts Narayana with its defaults: a synced file for each transaction. */
    private static TransactionManager narayana(String directory) throws Exception {
        BeanPopulator.getDefaultInstance(CoreEnvironmentBean.class).setNodeIdentifier(NODE);
        for (String store : new String[] {null, "communicationStore", "stateStore"}) {
            BeanPopulator.getNamedInstance(ObjectStoreEnvironmentBean.class, store).setObjectStoreDir(directory);
        }
        return com.arjuna.ats.jta.TransactionManager.transactionManager();
    }

    private static void seed(Options options) throws JMSException {
        int seeds = options.number("seeds");
        if (seeds == 0) {
            return;
        }
        try (XAConnection connection = options.connectionFactory().createXAConnection()) {
            Connection plain = connection; // its sessions commit on their own
            Session session = plain.createSession(true, Session.SESSION_TRANSACTED);
            MessageProducer producer = session.createProducer(session.createQueue(options.text("queue")));
            for (int i = 0; i < seeds; i++) {
                producer.send(session.createTextMessage(options.body()));
            }
            session.commit();
        }
    }

    private static long cpuNanos() {
        return ((OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
    }

    private static void report(List<Worker> workers, long from, long spanNanos, long cpuNanos) {
        List<Long> taken = new ArrayList<>();
        workers.forEach(each -> each.collect(from, taken));
        Collections.sort(taken);
        long failures = workers.stream().filter(each -> each.failure() != null).count();
        int all = workers.stream().mapToInt(Worker::transactions).sum();
        OUTPUT.printf(Locale.ROOT, "{\"failures\":%d,\"per_s\":%.2f,\"p50_ms\":%.3f,\"p99_ms\":%.3f,\"transactions\":%d,\"cpu_ms\":%.1f}%n",
            failures, taken.size() / (spanNanos / 1e9), quantileMs(taken, 0.5), quantileMs(taken, 0.99), all,
            cpuNanos / (double) TimeUnit.MILLISECONDS.toNanos(1));
    }

    private static double quantileMs(List<Long> sorted, double share) {
        return sorted.isEmpty() ? 0 : sorted.get((int) (sorted.size() * share)) / (double) TimeUnit.MILLISECONDS.toNanos(1);
    }
}
