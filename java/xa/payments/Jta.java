package bascule.payments;

import jakarta.transaction.TransactionManager;
import java.nio.file.Path;
import java.util.List;

/** The parts that JTA leaves to each transaction manager: its configuration, how it learns of resources, and its recovery. */
interface Jta {
    /** Identifies this application in the ids of its transactions: recovery ends only these. */
    String NODE = "shop";

    /**
     * Starts a transaction manager.
     *
     * @param name "narayana" or "atomikos"
     * @param directory of its log
     * @param timeoutSeconds of a transaction
     * @param resources of which all take part in each transaction
     */
    static Jta start(String name, Path directory, int timeoutSeconds, List<PausingResource> resources) throws Exception {
        switch (name) {
            case "narayana":
                return new NarayanaJta(directory, timeoutSeconds, resources);
            case "atomikos":
                return new AtomikosJta(directory, timeoutSeconds, resources);
            default:
                throw new IllegalArgumentException("\"" + name + "\" is neither narayana nor atomikos");
        }
    }

    TransactionManager manager() throws Exception;

    /** Commits transactions with a decision in the log, and rolls back other branches that are old enough. */
    void recover() throws Exception;
}
