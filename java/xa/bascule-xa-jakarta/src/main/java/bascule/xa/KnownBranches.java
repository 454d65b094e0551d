package bascule.xa;

import java.util.LinkedHashMap;
import java.util.Map;
import javax.transaction.xa.XAException;

/**
 * The branches that the resources of one factory have started, or have found prepared, and that have not ended as far as they know.
 *
 * <p>A resource refuses calls in the wrong order by it, without a request to the broker. The broker has the last word about a branch that is
 * not known here.
 */
final class KnownBranches {
    /** The broker prepares as many; the oldest are forgotten first. */
    private static final int BRANCHES_MAX = 10_000;

    /** The branches that are not prepared; null for a prepared branch. */
    private final Map<BranchId, OpenBranch> branches = new LinkedHashMap<>() {
        private static final long serialVersionUID = 1L;

        @Override
        protected boolean removeEldestEntry(Map.Entry<BranchId, OpenBranch> eldest) {
            return size() > BRANCHES_MAX;
        }
    };

    /** Adds a branch that a resource begins. Returns false if the branch is known already. */
    synchronized boolean begin(BranchId id, OpenBranch branch) {
        if (branches.containsKey(id)) {
            return false;
        }
        branches.put(id, branch);
        return true;
    }

    synchronized void prepared(BranchId id) {
        branches.put(id, null);
    }

    synchronized void ended(BranchId id) {
        branches.remove(id);
    }

    synchronized boolean isPrepared(BranchId id) {
        return branches.containsKey(id) && branches.get(id) == null;
    }

    /** Returns the branch if a resource has begun it, and it is not prepared; otherwise null. */
    synchronized OpenBranch open(BranchId id) {
        return branches.get(id);
    }

    /** Returns the error of a call about a branch that is not open. */
    XAException unknown(BranchId id, String call) {
        if (isPrepared(id)) {
            return Failure.of(XAException.XAER_PROTO, call + ": branch " + id + " is prepared");
        }
        return Failure.of(XAException.XAER_NOTA, call + ": branch " + id + " was not started on this session");
    }
}
