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

    /** The resource that has begun a branch; null for a prepared branch. */
    private final Map<BranchId, BranchResource> owners = new LinkedHashMap<>() {
        private static final long serialVersionUID = 1L;

        @Override
        protected boolean removeEldestEntry(Map.Entry<BranchId, BranchResource> eldest) {
            return size() > BRANCHES_MAX;
        }
    };

    /** Adds a branch that a resource begins. Returns false if the branch is known already. */
    synchronized boolean begin(BranchId id, BranchResource owner) {
        if (owners.containsKey(id)) {
            return false;
        }
        owners.put(id, owner);
        return true;
    }

    synchronized void prepared(BranchId id) {
        owners.put(id, null);
    }

    synchronized void ended(BranchId id) {
        owners.remove(id);
    }

    synchronized boolean isPrepared(BranchId id) {
        return owners.containsKey(id) && owners.get(id) == null;
    }

    /** Returns the resource that has begun a branch, and not prepared it; null if there is none. */
    synchronized BranchResource owner(BranchId id) {
        return owners.get(id);
    }
}
