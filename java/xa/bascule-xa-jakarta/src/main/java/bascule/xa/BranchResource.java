package bascule.xa;

import jakarta.jms.JMSException;
import java.util.ArrayList;
import java.util.List;
import java.util.stream.Collectors;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;
import org.apache.qpid.jms.JmsConnection;

/**
 * The {@code XAResource} of one session.
 *
 * <p>Until it is prepared, a branch is the local transactions of its sessions, and ends with their connection. A prepared branch belongs to
 * the broker: any resource can end it. A session has one branch at a time. The next branch starts after the prepare, the one-phase commit or
 * the rollback.
 *
 * <p>The resource that begins a branch owns it. Resources of other sessions of the connection join it, and leave its end to the owner. A
 * resource may lock the owner of its branch, and an owner locks no resource.
 */
final class BranchResource implements XAResource {
    private final JmsConnection connection;
    private final BranchSession session;
    private final BranchRequests requests;
    private final KnownBranches known;
    /** The work of this session; null without a branch. */
    private SessionWork work;
    private BranchResource owner = this;
    /** The work of other sessions in the branch of this resource. */
    private final List<SessionWork> joined = new ArrayList<>();
    /** The local transaction that has become a branch, and that the session has still to leave; null without one. */
    private String handedOver;
    private Deadline deadline = Deadline.NONE;
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
                if (has(id)) {
                    work.restart(false, "start(TMJOIN)");
                } else {
                    join(id);
                }
                break;
            case TMRESUME:
                own(id, "start(TMRESUME)");
                work.restart(true, "start(TMRESUME)");
                break;
            default:
                throw Failure.of(XAException.XAER_INVAL, "start: invalid flags " + flags + "; use TMNOFLAGS, TMJOIN or TMRESUME");
        }
    }

    private void begin(BranchId id) throws XAException {
        if (has(id)) {
            throw Failure.of(XAException.XAER_DUPID, "start: branch " + id + " has already been started");
        }
        refuseSecondBranch();
        if (!known.begin(id, this)) {
            throw Failure.of(XAException.XAER_DUPID, "start: branch " + id + " exists: another session has started it, or it is prepared");
        }
        deadline = Deadline.in(timeoutSeconds);
        try {
            work = fresh(id, deadline);
        } finally {
            if (work == null) {
                known.ended(id);
            }
        }
    }

    /** Takes part in a branch that another session of the connection has begun. */
    private void join(BranchId id) throws XAException {
        refuseSecondBranch();
        BranchResource found = known.owner(id);
        if (found == null) {
            throw unknown(id, "start(TMJOIN)");
        }
        if (found.connection != connection) {
            throw Failure.of(XAException.XAER_PROTO, "start(TMJOIN): branch " + id + " belongs to another connection, and can only be joined there");
        }
        work = found.admit(id, this);
        owner = found;
    }

    /** Returns the work of another session, which joins a branch of this resource. */
    private synchronized SessionWork admit(BranchId id, BranchResource other) throws XAException {
        if (!has(id)) {
            throw unknown(id, "start(TMJOIN)");
        }
        SessionWork joining = other.fresh(id, deadline);
        joined.add(joining);
        return joining;
    }

    private void refuseSecondBranch() throws XAException {
        if (work != null) {
            throw Failure.of(
                XAException.XAER_PROTO, "start: branch " + work.branch + " of this session has not been prepared, committed or rolled back yet");
        }
    }

    /** Begins the work of the session in its local transaction. The caller holds the lock. */
    private SessionWork fresh(BranchId id, Deadline until) throws XAException {
        leaveHandedOver();
        String transaction;
        try {
            transaction = session.freshTransactionId();
        } catch (JMSException failure) {
            throw Failure.of(XAException.XAER_RMFAIL, "start: " + failure.getMessage(), failure);
        }
        if (transaction == null) {
            throw Failure.of(XAException.XAER_RMFAIL, "start: the connection of the session is lost or closed");
        }
        return new SessionWork(id, transaction, session, until);
    }

    @Override
    public synchronized void end(Xid xid, int flags) throws XAException {
        leaveFinished();
        own(BranchId.checked(xid, "end"), "end");
        work.end(flags);
    }

    @Override
    public synchronized int prepare(Xid xid) throws XAException {
        BranchId id = BranchId.checked(xid, "prepare");
        leaveFinished();
        own(id, "prepare");
        if (owner != this) {
            return owner.prepare(xid);
        }
        checkCommittable("prepare");
        try {
            int vote = requests.prepare(id, transactions());
            if (vote == XA_OK) {
                known.prepared(id);
            } else {
                known.ended(id);
            }
            handOver();
            return vote;
        } catch (XAException failure) {
            giveUp();
            throw failure;
        }
    }

    @Override
    public synchronized void commit(Xid xid, boolean onePhase) throws XAException {
        BranchId id = BranchId.checked(xid, "commit");
        leaveFinished();
        if (!onePhase) {
            refuseUnprepared(id);
            finish(id, () -> requests.commit(id, this::leaveHandedOver));
            return;
        }
        own(id, "commit");
        if (owner != this) {
            owner.commit(xid, true);
            return;
        }
        checkCommittable("commit");
        try {
            requests.commitOnePhase(id, transactions());
            known.ended(id);
            handOver();
            leaveHandedOver();
        } catch (XAException failure) {
            giveUp();
            throw failure;
        }
    }

    @Override
    public synchronized void rollback(Xid xid) throws XAException {
        BranchId id = BranchId.checked(xid, "rollback");
        leaveFinished();
        if (!has(id)) {
            finish(id, () -> requests.rollback(id));
        } else if (owner != this) {
            owner.rollback(xid);
        } else {
            giveUp();
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
    public synchronized void forget(Xid xid) throws XAException {
        BranchId id = BranchId.checked(xid, "forget");
        finish(id, () -> requests.forget(id));
    }

    /** Returns the seconds after which a branch can only be rolled back; 0 if only the broker's {@code transaction_timeout_s} applies. */
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

    private boolean has(BranchId id) {
        return work != null && work.branch.equals(id);
    }

    private void own(BranchId id, String call) throws XAException {
        if (!has(id)) {
            throw unknown(id, call);
        }
    }

    private XAException unknown(BranchId id, String call) {
        if (known.isPrepared(id)) {
            return Failure.of(XAException.XAER_PROTO, call + ": branch " + id + " is prepared");
        }
        return Failure.of(XAException.XAER_NOTA, call + ": branch " + id + " was not started on this session");
    }

    private void refuseUnprepared(BranchId id) throws XAException {
        if (has(id) || known.owner(id) != null) {
            throw Failure.of(XAException.XAER_PROTO, "commit: branch " + id + " is not prepared");
        }
    }

    /** Rolls back a branch that cannot be committed, and throws the reason. */
    private void checkCommittable(String call) throws XAException {
        for (SessionWork each : all()) {
            each.checkEnded(call);
        }
        for (SessionWork each : all()) {
            XAException refusal = each.refusal(call);
            if (refusal != null) {
                giveUp();
                throw refusal;
            }
        }
    }

    /** Returns the work of all sessions in the branch of this resource, its own first. */
    private List<SessionWork> all() {
        List<SessionWork> all = new ArrayList<>(List.of(work));
        all.addAll(joined);
        return all;
    }

    private List<String> transactions() {
        return all().stream().map(each -> each.transaction).collect(Collectors.toList());
    }

    /** Notes that the broker has the branch. Each session leaves its local transaction before it begins the next one. */
    private void handOver() {
        joined.forEach(SessionWork::handOver);
        joined.clear();
        handedOver = work.transaction;
        work = null;
    }

    /** Forgets the branch that this resource has joined, if its owner has ended it. */
    private void leaveFinished() {
        if (work != null && work.isOver()) {
            handedOver = work.isHandedOver() ? work.transaction : null;
            work = null;
            owner = this;
        }
    }

    /**
     * Goes on to the next local transaction if the present one has become a branch, which is the broker's.
     *
     * <p>This is a round trip, which the session makes while the broker stores the commit of the branch. It must follow the answer to the
     * prepare: if the broker had refused the prepare, the discharge would commit the work of the branch.
     */
    synchronized void leaveHandedOver() {
        if (handedOver != null) {
            String leaving = handedOver;
            handedOver = null;
            session.handedOver(leaving);
        }
    }

    /** Leaves the session, which is about to close; a branch that is not prepared ends with it. */
    synchronized void close() {
        leaveFinished();
        leaveHandedOver();
        if (work != null && owner == this) {
            known.ended(work.branch);
        }
    }

    private void giveUp() {
        known.ended(work.branch);
        joined.forEach(SessionWork::rollback);
        joined.clear();
        work.rollback();
        work = null;
    }
}
