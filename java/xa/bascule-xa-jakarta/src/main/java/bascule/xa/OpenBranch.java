package bascule.xa;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Future;
import java.util.stream.Collectors;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import org.apache.qpid.jms.JmsConnection;

/**
 * A branch that is not prepared yet: the work of sessions of one connection. Any resource can end it.
 *
 * <p>A resource may lock a branch, and a branch may lock the work in it. A branch locks no resource.
 */
final class OpenBranch {
    /** The broker refuses requests above 64 KiB, and the request to prepare names the transaction of each part. */
    static final int PARTS_MAX = 1000;

    final BranchId id;
    final JmsConnection connection;
    final Deadline deadline;
    private final BranchRequests requests;
    private final KnownBranches known;
    private final List<SessionWork> parts = new ArrayList<>();
    private Future<?> timer;
    private boolean over;

    /** Begins a branch of a connection. {@code requests} go over this connection. */
    OpenBranch(BranchId id, JmsConnection connection, BranchRequests requests, KnownBranches known, int timeoutSeconds) {
        this.id = id;
        this.connection = connection;
        this.requests = requests;
        this.known = known;
        this.deadline = Deadline.in(timeoutSeconds);
    }

    /** Returns whether the resource with these requests has begun the branch. */
    boolean isBegunWith(BranchRequests other) {
        return requests == other;
    }

    /** Rolls the work back after a number of seconds, if the branch is open then; never for 0. The branch can then only be rolled back. */
    synchronized void rollBackAfter(int seconds) {
        if (seconds > 0) {
            timer = Timeouts.after(seconds, this::expire);
        }
    }

    /** Returns new work of a session in its local transaction. */
    synchronized SessionWork work(BranchSession session, String transaction, String call) throws XAException {
        checkOpen(call);
        if (deadline.isOver()) {
            throw Failure.of(XAException.XA_RBTIMEOUT, call + ": branch " + id + " took longer than its transaction timeout");
        }
        if (parts.size() >= PARTS_MAX) {
            throw Failure.of(XAException.XAER_PROTO, call + ": branch " + id + " has been left and joined " + PARTS_MAX + " times, and cannot be again");
        }
        SessionWork added = new SessionWork(this, transaction, session, deadline);
        parts.add(added);
        return added;
    }

    /** Ends the work of a session for a resource that has no work in the branch. */
    synchronized void end(int flags) throws XAException {
        checkOpen("end");
        List<SessionWork> open = parts.stream().filter(SessionWork::isOpen).collect(Collectors.toList());
        if (open.size() != 1) {
            throw Failure.of(XAException.XAER_PROTO, "end: branch " + id + " is open on " + open.size() + " sessions; end it on each of them");
        }
        open.get(0).end(flags);
    }

    /** Makes the session of some work leave its local transaction, which the broker keeps. Does nothing if the branch is over. */
    synchronized void park(SessionWork part) throws XAException {
        if (!over && !part.isParked()) {
            part.park(part.isToKeep() && requests.suspend(id, part.transaction));
        }
    }

    /** Returns the vote, XA_OK or XA_RDONLY. */
    synchronized int prepare() throws XAException {
        checkCommittable("prepare");
        try {
            int vote = requests.prepare(id, transactions());
            if (vote == XAResource.XA_OK) {
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

    synchronized void commitOnePhase() throws XAException {
        checkCommittable("commit");
        try {
            requests.commitOnePhase(id, transactions());
            known.ended(id);
            handOver();
        } catch (XAException failure) {
            giveUp();
            throw failure;
        }
    }

    /** Rolls the branch back. Returns false if it is no longer open. */
    synchronized boolean rollback() {
        if (over) {
            return false;
        }
        giveUp();
        return true;
    }

    private synchronized void expire() {
        if (!over) {
            rollBackParts();
        }
    }

    private void checkOpen(String call) throws XAException {
        if (over) {
            throw known.unknown(id, call);
        }
    }

    /** Rolls back a branch that cannot be committed, and throws the reason. */
    private void checkCommittable(String call) throws XAException {
        checkOpen(call);
        for (SessionWork each : parts) {
            each.checkEnded(call);
        }
        for (SessionWork each : parts) {
            XAException refusal = each.refusal(call);
            if (refusal != null) {
                giveUp();
                throw refusal;
            }
        }
    }

    private List<String> transactions() {
        return parts.stream().map(each -> each.transaction).collect(Collectors.toList());
    }

    /** Notes that the broker has the branch. Each session leaves its local transaction before it begins the next one. */
    private void handOver() {
        finish();
        parts.forEach(SessionWork::handOver);
    }

    private void giveUp() {
        finish();
        known.ended(id);
        rollBackParts();
        parts.forEach(SessionWork::giveUp);
    }

    private void finish() {
        over = true;
        if (timer != null) {
            timer.cancel(false);
        }
    }

    private void rollBackParts() {
        List<String> kept = parts.stream().filter(SessionWork::rollback).map(each -> each.transaction).collect(Collectors.toList());
        if (!kept.isEmpty()) {
            requests.rollbackSuspended(id, kept);
        }
    }
}
