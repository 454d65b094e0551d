package bascule.xa;

import java.util.List;
import java.util.concurrent.TimeUnit;
import javax.transaction.xa.XAException;

/** The requests about branches, and the meaning of their answers. */
final class BranchRequests {
    /** How long an unanswered commit may be on its way into the journal. */
    private static final long SETTLE_NANOS = TimeUnit.SECONDS.toNanos(30);
    private static final long ASK_AGAIN_MS = 50;

    private final Management management;

    BranchRequests(Management management) {
        this.management = management;
    }

    /**
     * Returns the vote, XA_OK or XA_RDONLY. The answer to a repeated request tells the result of the first one.
     *
     * @param transactions ids of the local transactions of the branch
     */
    int prepare(BranchId id, List<String> transactions) throws XAException {
        Reply reply;
        try {
            reply = management.handOver("prepare", id, transactions, 0);
        } catch (AnswerLost lost) {
            reply = asked(() -> management.askAgain("prepare", id, transactions, 0));
        }
        checkVote(withoutRetry(reply));
        return reply.code;
    }

    /**
     * Commits a branch in one phase. Throws XAER_RMFAIL if the outcome stays unknown, XA_RBCOMMFAIL if the broker did not get the commit.
     */
    void commitOnePhase(BranchId id, List<String> transactions) throws XAException {
        long since = management.position();
        try {
            Reply reply = management.handOver("commit", id, transactions, since);
            if (reply.hasEnded(Reply.FORGOTTEN)) {
                throw Failure.of(XAException.XAER_RMFAIL, reply.description);
            }
            if (reply.code == XAException.XAER_RMFAIL) { // the broker failed at the request, and may have carried out a part of it
                settle(id, since, Failure.of(reply.code, reply.description));
                return;
            }
            checkVote(withoutRetry(reply));
        } catch (AnswerLost lost) {
            settle(id, since, lost);
        }
    }

    /**
     * Asks the broker to keep a local transaction that its session leaves. Returns false if the broker no longer has it.
     */
    boolean suspend(BranchId id, String transaction) throws XAException {
        Reply reply;
        try {
            reply = management.handOver("suspend", id, List.of(transaction), 0);
        } catch (AnswerLost lost) {
            return false; // the transaction ends with its connection
        }
        if (reply.code == XAException.XAER_INVAL) { // from a broker that does not know the operation
            throw Failure.of(XAException.XAER_PROTO, "start: branch " + id + " of this session has not been prepared, committed or rolled back yet,"
                + " and the broker cannot keep it: " + reply.description);
        }
        if (reply.code == XAException.XAER_NOTA) {
            return false;
        }
        check(reply);
        return true;
    }

    /** Rolls back transactions that the broker keeps. Without an answer, they end with their connection, or by the broker's timeout. */
    void rollbackSuspended(BranchId id, List<String> transactions) {
        for (int attempt = 0; attempt < 2; attempt++) { // the first one may find links that the broker has detached
            try {
                management.handOver("rollback", id, transactions, 0);
                return;
            } catch (AnswerLost lost) {
                continue;
            }
        }
    }

    /** Commits a prepared branch. Runs {@code meanwhile} before the answer, if the request could be sent. */
    void commit(BranchId id, Runnable meanwhile) throws XAException {
        Reply reply = asked(() -> management.ask("commit", id, meanwhile));
        if (reply.hasEnded(Reply.COMMITTED)) {
            return; // the answer to an earlier request was lost
        }
        if (reply.hasEnded(Reply.ROLLED_BACK) || reply.rolledBack()) {
            throw Failure.of(XAException.XA_HEURRB, reply.description);
        }
        if (reply.hasEnded(Reply.FORGOTTEN)) {
            throw Failure.of(XAException.XA_HEURHAZ, reply.description);
        }
        check(reply);
    }

    /** Rolls a prepared branch back. */
    void rollback(BranchId id) throws XAException {
        Reply reply = asked(() -> management.ask("rollback", id, 0));
        if (reply.hasEnded(Reply.ROLLED_BACK)) {
            return;
        }
        if (reply.hasEnded(Reply.COMMITTED)) {
            throw Failure.of(XAException.XA_HEURCOM, reply.description);
        }
        check(withoutRetry(reply));
    }

    void forget(BranchId id) throws XAException {
        check(withoutRetry(asked(() -> management.ask("forget", id, 0))));
    }

    /** Returns the branches that are prepared, or that an administrator has ended. */
    BranchId[] recover() throws XAException {
        Reply reply = withoutRetry(asked(() -> management.ask("recover", null, 0)));
        check(reply);
        return reply.text == null ? new BranchId[0] : reply.text.lines().map(BranchId::listed).toArray(BranchId[]::new);
    }

    /**
     * Settles a one-phase commit with an unknown outcome by a rollback: if the broker has not carried out the commit, it refuses the commit
     * from then on.
     */
    private void settle(BranchId id, long since, Exception unknown) throws XAException {
        long start = System.nanoTime();
        while (true) {
            Reply reply = asked(() -> management.ask("rollback", id, since));
            if (reply.hasEnded(Reply.COMMITTED)) {
                return;
            }
            if (reply.hasEnded(Reply.FORGOTTEN)) {
                throw Failure.of(XAException.XAER_RMFAIL, reply.description, unknown);
            }
            if (reply.succeeded() || reply.code == XAException.XAER_NOTA) {
                throw Failure.of(XAException.XA_RBCOMMFAIL, "the broker lost branch " + id + ": " + unknown.getMessage(), unknown);
            }
            if (reply.code != XAException.XA_RETRY || System.nanoTime() - start > SETTLE_NANOS) {
                throw Failure.of(XAException.XAER_RMFAIL, reply.description, unknown);
            }
            pause();
        }
    }

    private static void pause() throws XAException {
        try {
            TimeUnit.MILLISECONDS.sleep(ASK_AGAIN_MS);
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
            throw Failure.of(XAException.XAER_RMFAIL, "interrupted while the outcome of a commit was unknown", interrupted);
        }
    }

    /** Only a commit may be answered with XA_RETRY. */
    private static Reply withoutRetry(Reply reply) throws XAException {
        if (reply.code == XAException.XA_RETRY) {
            throw Failure.of(XAException.XAER_RMFAIL, reply.description);
        }
        return reply;
    }

    private static void check(Reply reply) throws XAException {
        if (!reply.succeeded()) {
            throw Failure.of(reply.code, reply.description);
        }
    }

    /** Throws the reason of a refused prepare or one-phase commit. The caller rolls the work back, which the code has to tell. */
    private static void checkVote(Reply reply) throws XAException {
        if (reply.code == XAException.XAER_DUPID || reply.code == XAException.XAER_INVAL) { // JTA does not allow the former in these calls
            throw Failure.of(XAException.XA_RBPROTO, reply.description);
        }
        check(reply);
    }

    private interface Question {
        Reply ask() throws AnswerLost;
    }

    private static Reply asked(Question question) throws XAException {
        try {
            return question.ask();
        } catch (AnswerLost lost) {
            throw Failure.of(XAException.XAER_RMFAIL, lost.getMessage(), lost);
        }
    }
}
