package bascule.xa;

import java.util.LinkedHashMap;
import java.util.Map;

/**
 * The branches that the resources of one factory have started, or have found prepared, and that have not ended as far as they know.
 *
 * <p>A resource refuses calls in the wrong order by it, without a request to the broker. The broker has the last word about a branch that is
 * not known here.
 */
final class KnownBranches {
    /** The broker prepares as many; the oldest are forgotten first. */
    private static final int BRANCHES_MAX = 10_000;

    /** Whether a branch is prepared. */
    private final Map<BranchId, Boolean> prepared = new LinkedHashMap<>() {
        private static final long serialVersionUID = 1L;

        @Override
        protected boolean removeEldestEntry(Map.Entry<BranchId, Boolean> eldest) {
            return size() > BRANCHES_MAX;
        }
    };

    /** Adds a branch. Returns false if it is known already. */
    synchronized boolean begin(BranchId id) {
        return prepared.putIfAbsent(id, false) == null;
    }

    synchronized void prepared(BranchId id) {
        prepared.put(id, true);
    }

    synchronized void ended(BranchId id) {
        prepared.remove(id);
    }

    synchronized boolean isPrepared(BranchId id) {
        return Boolean.TRUE.equals(prepared.get(id));
    }

    /** Returns whether a session works in a branch, or has worked in it and not prepared it. */
    synchronized boolean isUnprepared(BranchId id) {
        return Boolean.FALSE.equals(prepared.get(id));
    }
}
