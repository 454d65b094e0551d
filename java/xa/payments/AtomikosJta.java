package bascule.payments;

import com.atomikos.datasource.xa.XATransactionalResource;
import com.atomikos.icatch.config.Configuration;
import com.atomikos.icatch.config.UserTransactionServiceImp;
import com.atomikos.icatch.jta.UserTransactionManager;
import jakarta.transaction.TransactionManager;
import java.nio.file.Path;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.TimeUnit;
import javax.transaction.xa.XAResource;

/** Atomikos, which must know a resource before the resource is enlisted. Recovery waits for the timeout of a transaction. */
final class AtomikosJta implements Jta {
    private static final String PREFIX = "com.atomikos.icatch.";
    /** Limits retries in the transaction that meets a failure, instead of 50 s; recovery retries later. */
    private static final int RETRIES = 1;

    private final int timeoutSeconds;

    AtomikosJta(Path directory, int timeoutSeconds, List<PausingResource> resources) {
        this.timeoutSeconds = timeoutSeconds;
        directory.toFile().mkdirs();
        String timeout = Long.toString(TimeUnit.SECONDS.toMillis(timeoutSeconds));
        Properties properties = new Properties();
        properties.setProperty(PREFIX + "tm_unique_name", NODE);
        properties.setProperty(PREFIX + "log_base_dir", directory.toString());
        // Recovery rolls back a branch without a decision after it has known the branch for so long.
        properties.setProperty(PREFIX + "max_timeout", timeout);
        properties.setProperty(PREFIX + "default_jta_timeout", timeout);
        // Otherwise commit() also returns if an unavailable resource could be neither prepared nor rolled back.
        properties.setProperty(PREFIX + "throw_on_heuristic", "true");
        properties.setProperty(PREFIX + "oltp_max_retries", Integer.toString(RETRIES));
        properties.setProperty(PREFIX + "oltp_retry_interval", "1000");
        UserTransactionServiceImp service = new UserTransactionServiceImp(properties);
        resources.forEach(each -> service.registerResource(new Registered(each)));
        service.init();
    }

    @Override
    public TransactionManager manager() throws Exception {
        TransactionManager manager = new UserTransactionManager();
        manager.setTransactionTimeout(timeoutSeconds);
        return manager;
    }

    @Override
    public void recover() {
        Configuration.getRecoveryService().performRecovery();
    }

    /** Finds a resource by the instance that is enlisted. */
    private static final class Registered extends XATransactionalResource {
        private final PausingResource resource;

        Registered(PausingResource resource) {
            super(resource.name());
            this.resource = resource;
        }

        @Override
        protected XAResource refreshXAConnection() {
            return resource;
        }

        @Override
        public boolean usesXAResource(XAResource other) {
            return other == resource;
        }
    }
}
