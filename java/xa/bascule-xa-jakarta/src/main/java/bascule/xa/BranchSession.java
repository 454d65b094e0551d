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
 * <p>A branch works in the local transaction of the session. A prepare names the id of this transaction, which the broker has assigned. The
 * id changes when the connection fails over. A changed id shows that a branch has lost work.
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

    /** Returns whether a thread is sending or receiving. After {@link #suspend} no further call begins. */
    boolean isInUse() {
        return use.isLocked();
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

    /** Changes to the next local transaction after the broker has taken over the present one as a branch. */
    void handedOver(String transaction) {
        try {
            if (transaction.equals(transactionId())) {
                session.commit();
            } else {
                session.rollback();
            }
        } catch (JMSException lost) {
            suspend(); // the broker has the branch; the next start() checks the state of the session
        }
    }

    /** Rolls back the local transaction. If that fails, or another thread is in a call, closes the session, which also rolls back. */
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
            return; // the connection is lost, and the session with it
        }
    }
}
