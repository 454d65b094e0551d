package bascule.load;

import jakarta.jms.JMSException;
import jakarta.jms.Message;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.Queue;
import jakarta.jms.XAConnection;
import jakarta.jms.XASession;
import jakarta.transaction.TransactionManager;
import java.sql.PreparedStatement;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.BrokenBarrierException;
import java.util.concurrent.CyclicBarrier;
import javax.transaction.xa.XAResource;
import org.postgresql.xa.PGXADataSource;

/** A thread that runs one transaction after the other, with its own XA connection to each resource. */
final class Worker extends Thread {
    private static final String INSERT = "INSERT INTO payments (body) VALUES (?)";
    private static final long RECEIVE_MS = 30_000;

    private final Options options;
    private final TransactionManager manager;
    private final CyclicBarrier ready;
    private final List<XAResource> resources = new ArrayList<>();
    private final List<Long> startsNanos = new ArrayList<>();
    private final List<Long> takenNanos = new ArrayList<>();
    private PreparedStatement insert;
    private XASession session;
    private MessageProducer producer;
    private MessageConsumer consumer;
    private volatile long endNanos = Long.MAX_VALUE;
    private volatile Exception failure;

    Worker(Options options, TransactionManager manager, CyclicBarrier ready) throws Exception {
        this.options = options;
        this.manager = manager;
        this.ready = ready;
        if (options.uses("postgres")) {
            PGXADataSource source = new PGXADataSource();
            source.setUrl(options.text("jdbc"));
            javax.sql.XAConnection database = source.getXAConnection();
            insert = database.getConnection().prepareStatement(INSERT);
            resources.add(database.getXAResource());
        }
        if (options.uses("jms")) {
            XAConnection connection = options.connectionFactory().createXAConnection();
            session = connection.createXASession();
            connection.start();
            resources.add(session.getXAResource());
            if (options.receives()) {
                consumer = session.createConsumer(queue());
            }
        }
    }

    void endAt(long nanos) {
        endNanos = nanos;
    }

    Exception failure() {
        return failure;
    }

    /** Returns the number of transactions so far, without the first one. */
    int transactions() {
        return takenNanos.size();
    }

    /** Adds the nanoseconds of each transaction that began at or after a moment. */
    void collect(long fromNanos, List<Long> into) {
        for (int i = 0; i < takenNanos.size(); i++) {
            if (startsNanos.get(i) - fromNanos >= 0) {
                into.add(takenNanos.get(i));
            }
        }
    }

    @Override
    public void run() {
        try {
            transaction(); // opens the connections
            ready.await();
            for (long start = System.nanoTime(); start - endNanos < 0; start = System.nanoTime()) {
                transaction();
                startsNanos.add(start);
                takenNanos.add(System.nanoTime() - start);
            }
        } catch (Exception error) {
            fail(error);
        }
    }

    private void fail(Exception error) {
        failure = error;
        if (!(error instanceof BrokenBarrierException)) {
            error.printStackTrace();
        }
        ready.reset();
    }

    private void transaction() throws Exception {
        manager.begin();
        try {
            for (XAResource each : resources) {
                manager.getTransaction().enlistResource(each);
            }
            work();
        } catch (Exception error) {
            manager.rollback();
            throw error;
        }
        manager.commit();
    }

    private void work() throws Exception {
        if (consumer != null) {
            receive();
        }
        if (insert != null) {
            insert.setString(1, options.body());
            insert.executeUpdate();
        }
        if (session != null) {
            if (producer == null) {
                producer = session.createProducer(queue());
            }
            producer.send(session.createTextMessage(options.body()));
        }
    }

    private void receive() throws JMSException {
        Message message = consumer.receive(RECEIVE_MS);
        if (message == null) {
            throw new JMSException("no message came within " + RECEIVE_MS + " ms");
        }
    }

    private Queue queue() throws JMSException {
        return session.createQueue(options.text("queue"));
    }
}
