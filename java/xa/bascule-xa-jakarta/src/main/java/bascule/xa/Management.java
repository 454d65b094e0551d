package bascule.xa;

import jakarta.jms.DeliveryMode;
import jakarta.jms.JMSException;
import jakarta.jms.Message;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.Session;
import jakarta.jms.TemporaryQueue;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.apache.qpid.jms.JmsConnection;
import org.apache.qpid.jms.JmsSession;
import org.apache.qpid.jms.policy.JmsDefaultPrefetchPolicy;
import org.apache.qpid.jms.policy.JmsDefaultPresettlePolicy;

/** Requests to the broker's management node, on the connection of a session. */
final class Management {
    private static final String ADDRESS = "$management";
    private static final String TYPE = "bascule.xa";
    /** Timeout of an answer. A broker answers within the time of a journal append, or closes the connection; both take much less. */
    private static final long ANSWER_TIMEOUT_NANOS = TimeUnit.SECONDS.toNanos(120);
    /** Interval at which a waiting request checks whether its connection was lost. */
    private static final long LOOK_MS = 100;
    /** Answers that the broker may send before the client asks for them. */
    private static final int ANSWERS_PREFETCH = 10;
    private static final Runnable NOTHING = () -> {};

    private final JmsConnection connection;
    private final ConnectionStart start;
    private final Interruptions interruptions;
    private final Connector connector;
    private Session session;
    private MessageProducer producer;
    private MessageConsumer consumer;
    private TemporaryQueue answers;
    private int opened;
    private long requests;
    private long position;

    Management(JmsConnection connection, ConnectionStart start, Interruptions interruptions, Connector connector) {
        this.connection = connection;
        this.start = start;
        this.interruptions = interruptions;
        this.connector = connector;
    }

    /** Returns the largest position of the answers so far; 0 without any. */
    synchronized long position() {
        return position;
    }

    /** Sends a request about the local transactions of a branch, which only this connection has. {@code transactions} has their ids. */
    synchronized Reply handOver(String operation, BranchId branch, List<String> transactions, long since) throws AnswerLost {
        return request(operation, branch, transactions, since, NOTHING);
    }

    /** Sends a request that may be repeated: on this connection and, if there is no answer, once more on a new one. */
    synchronized Reply ask(String operation, BranchId branch, long since) throws AnswerLost {
        return askAgain(operation, branch, List.of(), since);
    }

    /** Does the same as {@link #ask}, and runs {@code meanwhile} between the request and its answer, if the request could be sent. */
    synchronized Reply ask(String operation, BranchId branch, Runnable meanwhile) throws AnswerLost {
        return askAgain(operation, branch, List.of(), 0, meanwhile);
    }

    /** Repeats a request whose answer was lost, which may be the one about a local transaction; see {@link #ask}. */
    synchronized Reply askAgain(String operation, BranchId branch, List<String> transactions, long since) throws AnswerLost {
        return askAgain(operation, branch, transactions, since, NOTHING);
    }

    private Reply askAgain(String operation, BranchId branch, List<String> transactions, long since, Runnable meanwhile) throws AnswerLost {
        try {
            return request(operation, branch, transactions, since, meanwhile);
        } catch (AnswerLost lost) {
            return askOnNewConnection(operation, branch, transactions, since);
        }
    }

    synchronized void close() {
        Session closing = session;
        session = null;
        if (closing != null) {
            try {
                closing.close();
            } catch (JMSException broken) {
                return; // the connection is lost, and the session with it
            }
        }
    }

    private Reply askOnNewConnection(String operation, BranchId branch, List<String> transactions, long since) throws AnswerLost {
        JmsConnection other;
        try {
            other = connector.connect();
        } catch (JMSException failure) {
            throw new AnswerLost("no connection to the broker: " + failure.getMessage(), failure);
        }
        Interruptions losses = new Interruptions();
        other.addConnectionListener(losses);
        try {
            Reply reply = new Management(other, new ConnectionStart(other), losses, connector).request(operation, branch, transactions, since, NOTHING);
            position = Math.max(position, reply.position);
            return reply;
        } finally {
            try {
                other.close();
            } catch (JMSException broken) {
                other = null; // the answer has arrived
            }
        }
    }

    private Reply request(String operation, BranchId branch, List<String> transactions, long since, Runnable meanwhile)
        throws AnswerLost {
        try {
            open();
            start.beginRequest();
            try {
                Reply reply = new Reply(answer(message(operation, branch, transactions, since), meanwhile));
                position = Math.max(position, reply.position);
                return reply;
            } finally {
                start.endRequest();
            }
        } catch (JMSException failure) {
            close();
            throw new AnswerLost(operation + ": " + failure.getMessage(), failure);
        }
    }

    /** Creates all links again after an interruption: the old temporary queue and its messages are lost with the old connection. */
    private void open() throws JMSException {
        int lost = interruptions.count();
        if (session != null && lost == opened) {
            return;
        }
        close();
        JmsSession opening = (JmsSession) connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        session = opening;
        saveRoundTrips(opening);
        answers = session.createTemporaryQueue();
        consumer = session.createConsumer(answers);
        producer = session.createProducer(session.createQueue(ADDRESS));
        producer.setDeliveryMode(DeliveryMode.NON_PERSISTENT);
        producer.setDisableMessageID(true);
        producer.setDisableMessageTimestamp(true);
        opened = lost;
    }

    /**
     * Sends requests and answers settled, and lets the broker send an answer at once: a request is one round trip.
     *
     * <p>An answer confirms its request. If the connection is lost, both are repeated. If the broker refuses a settled request, it detaches
     * the link, which counts as an interruption.
     */
    private static void saveRoundTrips(JmsSession session) {
        if (session.getPresettlePolicy() instanceof JmsDefaultPresettlePolicy) {
            ((JmsDefaultPresettlePolicy) session.getPresettlePolicy()).setPresettleAll(true);
        }
        if (session.getPrefetchPolicy() instanceof JmsDefaultPrefetchPolicy) {
            ((JmsDefaultPrefetchPolicy) session.getPrefetchPolicy()).setAll(ANSWERS_PREFETCH);
        }
    }

    private Message message(String operation, BranchId branch, List<String> transactions, long since) throws JMSException {
        Message request = session.createMessage();
        request.setStringProperty("type", TYPE);
        request.setStringProperty("operation", operation);
        if (branch != null) {
            request.setIntProperty("formatId", branch.getFormatId());
            request.setStringProperty("gtrid", Hex.of(branch.getGlobalTransactionId()));
            request.setStringProperty("bqual", Hex.of(branch.getBranchQualifier()));
        }
        if (!transactions.isEmpty()) {
            request.setStringProperty("txnId", String.join(",", transactions)); // a broker that does not know such lists refuses them
        }
        if (since > 0) {
            request.setLongProperty("since", since);
        }
        request.setJMSReplyTo(answers);
        request.setJMSCorrelationID(Long.toString(++requests));
        return request;
    }

    private Message answer(Message request, Runnable meanwhile) throws JMSException {
        String id = request.getJMSCorrelationID();
        producer.send(request);
        meanwhile.run();
        long start = System.nanoTime();
        while (interruptions.count() == opened) {
            Message answer = consumer.receive(LOOK_MS);
            if (answer != null && id.equals(answer.getJMSCorrelationID())) {
                return answer;
            }
            if (System.nanoTime() - start > ANSWER_TIMEOUT_NANOS) {
                throw new JMSException("the broker did not answer");
            }
        }
        throw new JMSException("the broker did not answer: " + interruptions.reason());
    }
}
