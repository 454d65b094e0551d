package bascule.xa;

import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;

/**
 * The work of one session in a branch: a local transaction of the session.
 *
 * <p>The resource of the session starts and ends the work. {@link OpenBranch} prepares, commits or rolls back all work of the branch, in
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

    final OpenBranch branch;
    final String transaction;
    private final BranchSession session;
    private final Deadline deadline;
    private State state = State.ACTIVE;
    private boolean handedOver;
    /** Whether the session has left the local transaction, which the broker keeps for the branch. */
    private boolean parked;
    /** Whether the local transaction was lost before the session left it. */
    private boolean lost;
    private boolean rolledBack;

    SessionWork(OpenBranch branch, String transaction, BranchSession session, Deadline deadline) {
        this.branch = branch;
        this.transaction = transaction;
        this.session = session;
        this.deadline = deadline;
        session.activate(deadline);
    }

    /** Continues work that has ended, or that is suspended. */
    synchronized void restart(boolean resumes, String call) throws XAException {
        checkRestart(resumes, call);
        state = State.ACTIVE;
        session.activate(deadline);
    }

    /** Notes that the session continues in another local transaction. */
    synchronized void continued(boolean resumes, String call) throws XAException {
        checkRestart(resumes, call);
        state = State.ENDED;
    }

    private void checkRestart(boolean resumes, String call) throws XAException {
        if (state != (resumes ? State.SUSPENDED : State.ENDED)) {
            throw Failure.of(XAException.XAER_PROTO, call + ": branch " + branch.id + " is " + state);
        }
        if (deadline.isOver()) {
            throw timedOut(call);
        }
    }

    synchronized void end(int flags) throws XAException {
        if (state != State.ACTIVE && !(state == State.SUSPENDED && flags != XAResource.TMSUSPEND)) {
            throw Failure.of(XAException.XAER_PROTO, "end: branch " + branch.id + " is not active");
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
        if (!parked) {
            session.suspend();
        }
    }

    /** Marks a branch for rollback if another thread is in a call: it is unknown whether the call is part of the branch. */
    private void refuseCallsInProgress() throws XAException {
        if (parked) {
            return; // the session works in another branch
        }
        session.suspend();
        if (session.isInUse()) {
            state = State.FAILED;
            throw Failure.of(
                XAException.XA_RBPROTO, "end: branch " + branch.id + " must be rolled back: another thread is sending or receiving in it");
        }
    }

    /** Returns whether the work has not ended: it is active, or suspended. */
    synchronized boolean isOpen() {
        return state == State.ACTIVE || state == State.SUSPENDED;
    }

    synchronized boolean isActive() {
        return state == State.ACTIVE;
    }

    /** Throws XAER_PROTO if the work has not ended. */
    synchronized void checkEnded(String call) throws XAException {
        if (isOpen()) {
            throw Failure.of(XAException.XAER_PROTO, call + ": branch " + branch.id + " has not ended");
        }
    }

    /** Returns the reason why the work cannot be committed, with its code, or null. */
    synchronized XAException refusal(String call) {
        if (state == State.FAILED) {
            return rolledBack(XAException.XA_RBROLLBACK, call, "its work has failed");
        }
        if (deadline.isOver()) {
            return timedOut(call);
        }
        if (lost || !parked && isLost()) {
            return rolledBack(XAException.XA_RBCOMMFAIL, call, "a session was closed, or its connection was lost, while the branch was active");
        }
        return null;
    }

    private XAException timedOut(String call) {
        return rolledBack(XAException.XA_RBTIMEOUT, call, "it took longer than its transaction timeout");
    }

    private XAException rolledBack(int code, String call, String why) {
        return Failure.of(code, call + ": branch " + branch.id + " was rolled back: " + why);
    }

    /** Returns whether the session no longer has the local transaction, which it has not left. */
    private boolean isLost() {
        return !transaction.equals(session.transactionId());
    }

    synchronized boolean isOver() {
        return state == State.OVER;
    }

    /** Returns whether the session has still to leave its local transaction, which is over and belongs to the broker. */
    synchronized boolean isHandedOver() {
        return handedOver;
    }

    synchronized boolean isParked() {
        return parked;
    }

    /** Returns whether the broker has to be asked to keep the local transaction before the session leaves it. */
    synchronized boolean isToKeep() {
        return !rolledBack && !isLost();
    }

    /** Leaves the local transaction, so that the session can begin the next one. The broker keeps it if {@code kept}; else it is lost. */
    synchronized void park(boolean kept) {
        parked = true;
        lost = !kept;
        if (kept) {
            session.handedOver(transaction);
        } else if (!rolledBack) {
            session.rollback();
        }
    }

    /** Notes that the broker has the work now: prepared, committed, or nothing. */
    synchronized void handOver() {
        state = State.OVER;
        handedOver = !parked;
    }

    /** Marks the work as rolled back. Returns whether the broker still keeps its transaction, and has to roll it back. */
    synchronized boolean rollback() {
        boolean first = !rolledBack;
        rolledBack = true;
        if (first && !parked) {
            session.rollback();
        }
        return first && parked && !lost;
    }

    /** Notes that the branch is over, by a rollback. */
    synchronized void giveUp() {
        state = State.OVER;
    }
}
