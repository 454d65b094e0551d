package bascule.xa;

import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;

/**
 * The work of one session in a branch: a local transaction of the session.
 *
 * <p>The resource of the session starts and ends the work. The resource that began the branch prepares, commits or rolls back all of it, in
 * whatever thread the transaction manager does so.
 */
final class SessionWork {
    private enum State {
        ACTIVE,
        SUSPENDED,
        ENDED,
        /** The branch can only be rolled back. */
        FAILED,
        /** The branch is prepared, committed or rolled back. */
        OVER
    }

    final BranchId branch;
    final String transaction;
    private final BranchSession session;
    private final Deadline deadline;
    private State state = State.ACTIVE;
    private boolean handedOver;

    SessionWork(BranchId branch, String transaction, BranchSession session, Deadline deadline) {
        this.branch = branch;
        this.transaction = transaction;
        this.session = session;
        this.deadline = deadline;
        session.activate(deadline);
    }

    /** Continues work that has ended, or that is suspended. */
    synchronized void restart(boolean resumes, String call) throws XAException {
        if (state != (resumes ? State.SUSPENDED : State.ENDED)) {
            throw Failure.of(XAException.XAER_PROTO, call + ": branch " + branch + " is " + state);
        }
        state = State.ACTIVE;
        session.activate(deadline);
    }

    synchronized void end(int flags) throws XAException {
        if (state != State.ACTIVE && !(state == State.SUSPENDED && flags != XAResource.TMSUSPEND)) {
            throw Failure.of(XAException.XAER_PROTO, "end: branch " + branch + " is not active");
        }
        switch (flags) {
            case XAResource.TMSUCCESS:
                refuseCallsInProgress();
                state = State.ENDED;
                break;
            case XAResource.TMFAIL:
                state = State.FAILED;
                break;
            case XAResource.TMSUSPEND:
                state = State.SUSPENDED;
                break;
            default:
                throw Failure.of(XAException.XAER_INVAL, "end: invalid flags " + flags + "; use TMSUCCESS, TMFAIL or TMSUSPEND");
        }
        session.suspend();
    }

    /** Marks a branch for rollback if another thread is in a call: it is unknown whether the call is part of the branch. */
    private void refuseCallsInProgress() throws XAException {
        session.suspend();
        if (session.isInUse()) {
            state = State.FAILED;
            throw Failure.of(
                XAException.XA_RBPROTO, "end: branch " + branch + " must be rolled back: another thread is sending or receiving in it");
        }
    }

    /** Throws XAER_PROTO if the work has not ended. */
    synchronized void checkEnded(String call) throws XAException {
        if (state == State.ACTIVE || state == State.SUSPENDED) {
            throw Failure.of(XAException.XAER_PROTO, call + ": branch " + branch + " has not ended");
        }
    }

    /** Returns the reason why the work cannot be committed, with its code, or null. */
    synchronized XAException refusal(String call) {
        if (state == State.FAILED) {
            return rolledBack(XAException.XA_RBROLLBACK, call, "its work has failed");
        }
        if (deadline.isOver()) {
            return rolledBack(XAException.XA_RBTIMEOUT, call, "it took longer than its transaction timeout");
        }
        if (!transaction.equals(session.transactionId())) {
            return rolledBack(XAException.XA_RBCOMMFAIL, call, "a session was closed, or its connection was lost, while the branch was active");
        }
        return null;
    }

    private XAException rolledBack(int code, String call, String why) {
        return Failure.of(code, call + ": branch " + branch + " was rolled back: " + why);
    }

    synchronized boolean isOver() {
        return state == State.OVER;
    }

    /** Returns whether the session has still to leave its local transaction, which is over and belongs to the broker. */
    synchronized boolean isHandedOver() {
        return handedOver;
    }

    /** Notes that the broker has the work now: prepared, committed, or nothing. */
    synchronized void handOver() {
        state = State.OVER;
        handedOver = true;
    }

    /** Rolls the local transaction back. */
    synchronized void rollback() {
        state = State.OVER;
        session.rollback();
    }
}
