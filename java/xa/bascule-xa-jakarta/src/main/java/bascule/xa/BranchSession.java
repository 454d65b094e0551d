package bascule.xa;

import jakarta.jms.IllegalStateException;
import jakarta.jms.JMSException;
import java.util.concurrent.locks.ReentrantLock;
import org.apache.qpid.jms.JmsSession;
import org.apache.qpid.jms.JmsTransactionContext;
import org.apache.qpid.jms.meta.JmsTransactionId;
import org.apache.qpid.proton.amqp.Binary;

/**
 * A transacted session of Qpid JMS that branches use one after the other.
 *
 * <p>A branch works in the session's local transaction. The transaction's id, which the broker gave, is what a prepare names. It changes
 * when the connection fails over, so a branch that lost work is recognized by it.
 */
final class BranchSession {
    private final JmsSession session;
    /** Held by the thread that sends or receives. */
    private final ReentrantLock use = new ReentrantLock();
    private volatile boolean active;
    private volatile Deadline deadline = Deadline.NONE;

    BranchSession(JmsSession session) {
        this.session = session;
    }

    JmsSession session() {
        return session;
    }

    /** Lets the application send and receive until {@link #suspend}. */
    void activate(Deadline until) {
        deadline = until;
        active = true;
    }

    void suspend() {
        active = false;
    }

    /** Begins a call of the application that sends or receives. */
    void enter() throws JMSException {
        if (!use.tryLock()) {
            throw new IllegalStateException("another thread is using this session");
        }
        try {
            if (!active) {
                throw new IllegalStateException("no transaction branch is active on this session; enlist its XAResource first");
            }
            if (deadline.isOver()) {
                throw new IllegalStateException("the transaction has timed out and will be rolled back");
            }
        } catch (JMSException refusal) {
            use.unlock();
            throw refusal;
        }
    }

    void leave() {
        use.unlock();
    }

    /** Returns the hexadecimal id of the local transaction, or null if there is none that could be committed. */
    String transactionId() {
        if (session.isClosed()) {
            return null;
        }
        JmsTransactionContext context = session.getTransactionContext();
        JmsTransactionId id = context.isInDoubt() ? null : context.getTransactionId();
        Binary name = id == null ? null : (Binary) id.getProviderTxId();
        return name == null ? null : Hex.of(name.getArray(), name.getArrayOffset(), name.getLength());
    }

    /** Begins a new local transaction if the present one was interrupted, and returns the id of the present one, or null. */
    String freshTransactionId() throws JMSException {
        if (transactionId() == null) {
            session.rollback();
        }
        return transactionId();
    }

    /** Goes on to the next local transaction after the broker has taken the present one as a branch. */
    void handedOver(String transaction) {
        try {
            if (transaction.equals(transactionId())) {
                session.commit();
            } else {
                session.rollback();
            }
        } catch (JMSException lost) {
            suspend(); // the branch is safe at the broker; the next start() looks at the state of the session
        }
    }

    /** Rolls the local transaction back. If that fails, or another thread is in a call, closes the session, which rolls back too. */
    void rollback() {
        suspend();
        if (!use.tryLock()) {
            close();
            return;
        }
        try {
            session.rollback();
        } catch (JMSException failure) {
            close();
        } finally {
            use.unlock();
        }
    }

    void close() {
        suspend();
        try {
            session.close();
        } catch (JMSException broken) {
            return; // the connection is gone, and the session with it
        }
    }
}
