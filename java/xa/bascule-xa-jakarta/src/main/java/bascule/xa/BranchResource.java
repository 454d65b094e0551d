package bascule.xa;

import jakarta.jms.JMSException;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;

/**
 * The {@code XAResource} of one session.
 *
 * <p>Until it is prepared, a branch is the local transaction of its session, and ends with the connection of the session. A prepared branch
 * belongs to the broker: any resource can end it. A session has one branch at a time. The next branch starts after the prepare, the
 * one-phase commit or the rollback.
 */
final class BranchResource implements XAResource {
    private enum State {
        ACTIVE,
        SUSPENDED,
        ENDED,
        /** The branch can only be rolled back. */
        FAILED
    }

    private final BranchSession session;
    private final BranchRequests requests;
    private final KnownBranches known;
    private BranchId branch;
    private State state;
    private String transaction;
    /** The local transaction that has become a branch, and that the session has still to leave; null without one. */
    private String handedOver;
    private Deadline deadline = Deadline.NONE;
    private int timeoutSeconds;
    private boolean scanning;

    BranchResource(BranchSession session, Management management, KnownBranches known) {
        this.session = session;
        this.known = known;
        this.requests = new BranchRequests(management);
    }

    @Override
    public synchronized void start(Xid xid, int flags) throws XAException {
        BranchId id = BranchId.checked(xid, "start");
        switch (flags) {
            case TMNOFLAGS:
                begin(id);
                break;
            case TMJOIN:
                require(id, State.ENDED, "start(TMJOIN)");
                break;
            case TMRESUME:
                require(id, State.SUSPENDED, "start(TMRESUME)");
                break;
            default:
                throw Failure.of(XAException.XAER_INVAL, "start: invalid flags " + flags + "; use TMNOFLAGS, TMJOIN or TMRESUME");
        }
        state = State.ACTIVE;
        session.activate(deadline);
    }

    private void begin(BranchId id) throws XAException {
        if (id.equals(branch)) {
            throw Failure.of(XAException.XAER_DUPID, "start: branch " + id + " has already been started");
        }
        if (branch != null) {
            throw Failure.of(XAException.XAER_PROTO, "start: branch " + branch + " of this session has not been prepared, committed or rolled back yet");
        }
        if (!known.begin(id)) {
            throw Failure.of(XAException.XAER_DUPID, "start: branch " + id + " exists: another session has started it, or it is prepared");
        }
        try {
            work(id);
        } finally {
            if (branch == null) {
                known.ended(id);
            }
        }
    }

    /** Begins the work of a branch in the local transaction of the session. */
    private void work(BranchId id) throws XAException {
        leaveHandedOver();
        try {
            transaction = session.freshTransactionId();
        } catch (JMSException failure) {
            throw Failure.of(XAException.XAER_RMFAIL, "start: " + failure.getMessage(), failure);
        }
        if (transaction == null) {
            throw Failure.of(XAException.XAER_RMFAIL, "start: the connection of the session is lost or closed");
        }
        branch = id;
        deadline = Deadline.in(timeoutSeconds);
    }

    @Override
    public synchronized void end(Xid xid, int flags) throws XAException {
        BranchId id = own(xid, "end");
        if (state != State.ACTIVE && !(state == State.SUSPENDED && flags != TMSUSPEND)) {
            throw Failure.of(XAException.XAER_PROTO, "end: branch " + id + " is not active");
        }
        switch (flags) {
            case TMSUCCESS:
                refuseCallsInProgress(id);
                state = State.ENDED;
                break;
            case TMFAIL:
                state = State.FAILED;
                break;
            case TMSUSPEND:
                state = State.SUSPENDED;
                break;
            default:
                throw Failure.of(XAException.XAER_INVAL, "end: invalid flags " + flags + "; use TMSUCCESS, TMFAIL or TMSUSPEND");
        }
        session.suspend();
    }

    /** Marks a branch for rollback if another thread is in a call: it is unknown whether the call is part of the branch. */
    private void refuseCallsInProgress(BranchId id) throws XAException {
        session.suspend();
        if (session.isInUse()) {
            state = State.FAILED;
            throw Failure.of(XAException.XA_RBPROTO, "end: branch " + id + " must be rolled back: another thread is sending or receiving in it");
        }
    }

    @Override
    public synchronized int prepare(Xid xid) throws XAException {
        BranchId id = own(xid, "prepare");
        checkCommittable("prepare");
        try {
            int vote = requests.prepare(id, transaction);
            if (vote == XA_OK) {
                known.prepared(id);
            } else {
                known.ended(id);
            }
            branch = null;
            handedOver = transaction;
            return vote;
        } catch (XAException failure) {
            giveUp();
            throw failure;
        }
    }

    @Override
    public synchronized void commit(Xid xid, boolean onePhase) throws XAException {
        if (!onePhase) {
            BranchId prepared = BranchId.checked(xid, "commit");
            refuseUnprepared(prepared, "commit");
            finish(prepared, () -> requests.commit(prepared, this::leaveHandedOver));
            return;
        }
        BranchId id = own(xid, "commit");
        checkCommittable("commit");
        try {
            requests.commitOnePhase(id, transaction);
            known.ended(id);
            branch = null;
            handedOver = transaction;
            leaveHandedOver();
        } catch (XAException failure) {
            giveUp();
            throw failure;
        }
    }

    @Override
    public synchronized void rollback(Xid xid) throws XAException {
        BranchId id = BranchId.checked(xid, "rollback");
        if (!id.equals(branch)) {
            finish(id, () -> requests.rollback(id));
            return;
        }
        giveUp();
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

    /** Returns whether a branch can be joined: only by its own session, because a local transaction belongs to one session. */
    @Override
    public boolean isSameRM(XAResource other) {
        return other == this;
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

    private BranchId own(Xid xid, String call) throws XAException {
        BranchId id = BranchId.checked(xid, call);
        if (!id.equals(branch)) {
            if (known.isPrepared(id)) {
                throw Failure.of(XAException.XAER_PROTO, call + ": branch " + id + " is prepared");
            }
            throw Failure.of(XAException.XAER_NOTA, call + ": branch " + id + " was not started on this session");
        }
        return id;
    }

    private void require(BranchId id, State wanted, String call) throws XAException {
        own(id, call);
        if (state != wanted) {
            throw Failure.of(XAException.XAER_PROTO, call + ": branch " + id + " is " + state);
        }
    }

    private void refuseUnprepared(BranchId id, String call) throws XAException {
        if (id.equals(branch) || known.isUnprepared(id)) {
            throw Failure.of(XAException.XAER_PROTO, call + ": branch " + id + " is not prepared");
        }
    }

    /** Rolls back a branch that cannot be committed, and throws the reason. */
    private void checkCommittable(String call) throws XAException {
        if (state == State.ACTIVE || state == State.SUSPENDED) {
            throw Failure.of(XAException.XAER_PROTO, call + ": branch " + branch + " has not ended");
        }
        int code = 0;
        String why = "";
        if (state == State.FAILED) {
            code = XAException.XA_RBROLLBACK;
            why = "its work has failed";
        } else if (deadline.isOver()) {
            code = XAException.XA_RBTIMEOUT;
            why = "it took longer than " + timeoutSeconds + " s";
        } else if (!transaction.equals(session.transactionId())) {
            code = XAException.XA_RBCOMMFAIL;
            why = "the connection was lost while it was active";
        }
        if (code != 0) {
            BranchId rolledBack = branch;
            giveUp();
            throw Failure.of(code, call + ": branch " + rolledBack + " was rolled back: " + why);
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
        leaveHandedOver();
        if (branch != null) {
            known.ended(branch);
        }
    }

    private void giveUp() {
        if (branch != null) {
            known.ended(branch);
            branch = null;
            session.rollback();
        }
    }
}
