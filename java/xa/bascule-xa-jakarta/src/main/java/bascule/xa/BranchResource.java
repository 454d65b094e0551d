package bascule.xa;

import jakarta.jms.JMSException;
import java.util.HashMap;
import java.util.Map;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;
import org.apache.qpid.jms.JmsConnection;

/**
 * The {@code XAResource} of one session.
 *
 * <p>Until it is prepared, a branch is the local transactions of its sessions, and ends with their connection. A prepared branch belongs to
 * the broker. Any resource of the factory can end a branch, prepared or not.
 *
 * <p>A session works in one branch at a time. If it begins another branch, the broker keeps the local transaction of the branch that it
 * leaves. If it returns to that branch, it works in one more local transaction of the branch.
 */
final class BranchResource implements XAResource {
    private final JmsConnection connection;
    private final BranchSession session;
    private final BranchRequests requests;
    private final KnownBranches known;
    /** The work in the local transaction that the session has now; null without a branch. */
    private SessionWork work;
    /** The latest work of the session in each branch that it has left, and that is not over. */
    private final Map<BranchId, SessionWork> parked = new HashMap<>();
    /** The local transaction that has become a branch, and that the session has still to leave; null without one. */
    private String handedOver;
    private int timeoutSeconds;
    private boolean scanning;

    BranchResource(JmsConnection connection, BranchSession session, Management management, KnownBranches known) {
        this.connection = connection;
        this.session = session;
        this.known = known;
        this.requests = new BranchRequests(management);
    }

    @Override
    public synchronized void start(Xid xid, int flags) throws XAException {
        BranchId id = BranchId.checked(xid, "start");
        leaveFinished();
        switch (flags) {
            case TMNOFLAGS:
                begin(id);
                break;
            case TMJOIN:
                if (own(id) == null) {
                    join(id);
                } else {
                    restart(own(id), false, "start(TMJOIN)");
                }
                break;
            case TMRESUME:
                if (own(id) == null) {
                    throw known.unknown(id, "start(TMRESUME)");
                }
                restart(own(id), true, "start(TMRESUME)");
                break;
            default:
                throw Failure.of(XAException.XAER_INVAL, "start: invalid flags " + flags + "; use TMNOFLAGS, TMJOIN or TMRESUME");
        }
    }

    private void begin(BranchId id) throws XAException {
        if (own(id) != null) {
            throw Failure.of(XAException.XAER_DUPID, "start: branch " + id + " has already been started");
        }
        refuseActive("start");
        OpenBranch branch = new OpenBranch(id, connection, requests, known, timeoutSeconds);
        if (!known.begin(id, branch)) {
            throw Failure.of(XAException.XAER_DUPID, "start: branch " + id + " exists: another session has started it, or it is prepared");
        }
        SessionWork begun = null;
        try {
            begun = workIn(branch, "start");
            branch.rollBackAfter(timeoutSeconds);
        } finally {
            if (begun == null) {
                known.ended(id);
            }
        }
    }

    /** Takes part in a branch that another session of the connection has begun. */
    private void join(BranchId id) throws XAException {
        refuseActive("start(TMJOIN)");
        OpenBranch found = known.open(id);
        if (found == null) {
            throw known.unknown(id, "start(TMJOIN)");
        }
        if (found.connection != connection) {
            throw Failure.of(XAException.XAER_PROTO, "start(TMJOIN): branch " + id + " belongs to another connection, and can only be joined there");
        }
        workIn(found, "start(TMJOIN)");
    }

    /** Continues work of this session that has ended, or that is suspended. */
    private void restart(SessionWork former, boolean resumes, String call) throws XAException {
        if (former == work) {
            work.restart(resumes, call);
            return;
        }
        refuseActive(call);
        former.continued(resumes, call);
        workIn(former.branch, call);
        parked.remove(former.branch.id);
    }

    private void refuseActive(String call) throws XAException {
        if (work != null && work.isActive()) {
            throw Failure.of(XAException.XAER_PROTO, call + ": branch " + work.branch.id + " of this session has not ended yet");
        }
    }

    /** Begins work in the next local transaction of the session, and keeps the present one if its branch is not over. */
    private SessionWork workIn(OpenBranch branch, String call) throws XAException {
        String left = work == null ? null : work.transaction;
        if (work != null) {
            work.branch.park(work);
            parked.put(work.branch.id, work);
            leaveFinished();
            work = null;
        }
        leaveHandedOver();
        String transaction;
        try {
            transaction = session.freshTransactionId();
        } catch (JMSException failure) {
            throw Failure.of(XAException.XAER_RMFAIL, call + ": " + failure.getMessage(), failure);
        }
        if (transaction == null || transaction.equals(left)) {
            throw Failure.of(XAException.XAER_RMFAIL, call + ": the connection of the session is lost or closed");
        }
        work = branch.work(session, transaction, call);
        return work;
    }

    @Override
    public void end(Xid xid, int flags) throws XAException {
        BranchId id = BranchId.checked(xid, "end");
        SessionWork own;
        synchronized (this) {
            leaveFinished();
            own = own(id);
        }
        OpenBranch open = known.open(id);
        if (own != null) {
            own.end(flags);
        } else if (open != null && open.connection == connection) {
            open.end(flags);
        } else {
            throw known.unknown(id, "end");
        }
    }

    @Override
    public int prepare(Xid xid) throws XAException {
        BranchId id = BranchId.checked(xid, "prepare");
        return checkedOpen(id, "prepare").prepare();
    }

    @Override
    public void commit(Xid xid, boolean onePhase) throws XAException {
        BranchId id = BranchId.checked(xid, "commit");
        if (onePhase) {
            checkedOpen(id, "commit").commitOnePhase();
            leaveOver();
            return;
        }
        if (open(id) != null) {
            throw Failure.of(XAException.XAER_PROTO, "commit: branch " + id + " is not prepared");
        }
        synchronized (this) { // before the lock of the requests, which leaveOver() is called under
            finish(id, () -> requests.commit(id, this::leaveOver));
        }
    }

    @Override
    public void rollback(Xid xid) throws XAException {
        BranchId id = BranchId.checked(xid, "rollback");
        OpenBranch open = open(id);
        if (open == null || !open.rollback()) {
            finish(id, () -> requests.rollback(id));
        }
    }

    @Override
    public synchronized Xid[] recover(int flags) throws XAException {
        if ((flags & ~(TMSTARTRSCAN | TMENDRSCAN)) != 0) {
            throw Failure.of(XAException.XAER_INVAL, "recover: invalid flags " + flags + "; use TMSTARTRSCAN, TMENDRSCAN or TMNOFLAGS");
        }
        boolean starts = (flags & TMSTARTRSCAN) != 0;
        if (!starts && flags == TMNOFLAGS && !scanning) {
            throw Failure.of(XAException.XAER_INVAL, "recover: no scan is open; start one with TMSTARTRSCAN");
        }
        scanning = (flags & TMENDRSCAN) == 0;
        if (!starts) {
            return new Xid[0]; // the start of the scan has returned all branches
        }
        BranchId[] found = requests.recover();
        for (BranchId each : found) {
            known.prepared(each);
        }
        return found;
    }

    @Override
    public void forget(Xid xid) throws XAException {
        BranchId id = BranchId.checked(xid, "forget");
        finish(id, () -> requests.forget(id));
    }

    /** Returns the seconds after which a branch is rolled back; 0 if only the broker's {@code transaction_timeout_s} applies. */
    @Override
    public synchronized int getTransactionTimeout() {
        return timeoutSeconds;
    }

    @Override
    public synchronized boolean setTransactionTimeout(int seconds) throws XAException {
        if (seconds < 0) {
            throw Failure.of(XAException.XAER_INVAL, "invalid transaction timeout of " + seconds + " s; use a positive number, or 0 for the default");
        }
        timeoutSeconds = seconds;
        return true;
    }

    /** Returns whether a branch of one can be joined by the other: if they have one connection, which local transactions belong to. */
    @Override
    public boolean isSameRM(XAResource other) {
        return other instanceof BranchResource && ((BranchResource) other).connection == connection;
    }

    private interface Ending {
        void carryOut() throws XAException;
    }

    /** Ends a branch that is prepared, or was before. */
    private void finish(BranchId id, Ending ending) throws XAException {
        try {
            ending.carryOut();
        } catch (XAException failure) {
            if (failure.errorCode == XAException.XAER_NOTA) {
                known.ended(id);
            }
            throw failure;
        }
        known.ended(id);
    }

    /** Returns the work of this session in a branch, or null. The caller holds the lock. */
    private SessionWork own(BranchId id) {
        return work != null && work.branch.id.equals(id) ? work : parked.get(id);
    }

    /** Returns the branch that is not prepared, whichever resource of the factory has begun it, or null. */
    private OpenBranch open(BranchId id) {
        OpenBranch found = known.open(id);
        if (found != null) {
            return found;
        }
        synchronized (this) {
            leaveFinished();
            SessionWork own = own(id);
            return own == null ? null : own.branch;
        }
    }

    private OpenBranch checkedOpen(BranchId id, String call) throws XAException {
        OpenBranch found = open(id);
        if (found == null) {
            throw known.unknown(id, call);
        }
        return found;
    }

    /** Forgets the work of branches that are over. */
    private void leaveFinished() {
        if (work != null && work.isOver()) {
            handedOver = work.isHandedOver() ? work.transaction : null;
            work = null;
        }
        parked.values().removeIf(SessionWork::isOver);
    }

    /**
     * Goes on to the next local transaction if the present one has become a branch, which is the broker's.
     *
     * <p>This is a round trip, which the session makes while the broker stores the commit of the branch. It must follow the answer to the
     * prepare: if the broker had refused the prepare, the discharge would commit the work of the branch.
     */
    private synchronized void leaveOver() {
        leaveFinished();
        leaveHandedOver();
    }

    private void leaveHandedOver() {
        if (handedOver != null) {
            String leaving = handedOver;
            handedOver = null;
            session.handedOver(leaving);
        }
    }

    /** Leaves the session, which is about to close; a branch that is not prepared ends with it. */
    synchronized void close() {
        leaveOver();
        if (work != null && work.branch.isBegunWith(requests)) {
            known.ended(work.branch.id);
        }
    }
}
