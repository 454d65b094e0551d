package bascule.payments;

import com.arjuna.ats.arjuna.common.CoreEnvironmentBean;
import com.arjuna.ats.arjuna.common.ObjectStoreEnvironmentBean;
import com.arjuna.ats.arjuna.common.RecoveryEnvironmentBean;
import com.arjuna.ats.arjuna.recovery.RecoveryManager;
import com.arjuna.ats.internal.jta.recovery.arjunacore.JTANodeNameXAResourceOrphanFilter;
import com.arjuna.ats.internal.jta.recovery.arjunacore.JTATransactionLogXAResourceOrphanFilter;
import com.arjuna.ats.internal.jta.recovery.arjunacore.XARecoveryModule;
import com.arjuna.ats.jta.common.JTAEnvironmentBean;
import com.arjuna.ats.jta.recovery.XAResourceRecoveryHelper;
import com.arjuna.common.internal.util.propertyservice.BeanPopulator;
import jakarta.transaction.TransactionManager;
import java.nio.file.Path;
import java.util.List;
import javax.transaction.xa.XAResource;

/** Narayana, which learns of resources when they are enlisted, and from a helper for its recovery. */
final class NarayanaJta implements Jta {
    /** One pass finds branches in doubt that the log does not know; another pass finds them old enough. */
    private static final int PASSES = 2;

    private final int timeoutSeconds;
    private final List<PausingResource> resources;

    NarayanaJta(Path directory, int timeoutSeconds, List<PausingResource> resources) throws Exception {
        this.timeoutSeconds = timeoutSeconds;
        this.resources = resources;
        BeanPopulator.getDefaultInstance(CoreEnvironmentBean.class).setNodeIdentifier(NODE);
        for (String store : new String[] {null, "communicationStore", "stateStore"}) {
            BeanPopulator.getNamedInstance(ObjectStoreEnvironmentBean.class, store).setObjectStoreDir(directory.toString());
        }
        JTAEnvironmentBean jta = BeanPopulator.getDefaultInstance(JTAEnvironmentBean.class);
        jta.setXaRecoveryNodes(List.of(NODE));
        jta.setOrphanSafetyInterval(1);
        jta.setXaResourceOrphanFilterClassNames(
            List.of(JTATransactionLogXAResourceOrphanFilter.class.getName(), JTANodeNameXAResourceOrphanFilter.class.getName()));
        RecoveryEnvironmentBean recovery = BeanPopulator.getDefaultInstance(RecoveryEnvironmentBean.class);
        recovery.setRecoveryBackoffPeriod(1);
        recovery.setRecoveryListener(false);
    }

    @Override
    public TransactionManager manager() throws Exception {
        TransactionManager manager = com.arjuna.ats.jta.TransactionManager.transactionManager();
        manager.setTransactionTimeout(timeoutSeconds);
        return manager;
    }

    @Override
    public void recover() {
        RecoveryManager manager = RecoveryManager.manager(RecoveryManager.DIRECT_MANAGEMENT);
        manager.initialize();
        XARecoveryModule.getRegisteredXARecoveryModule().addXAResourceRecoveryHelper(new XAResourceRecoveryHelper() {
            @Override
            public boolean initialise(String properties) {
                return true;
            }

            @Override
            public XAResource[] getXAResources() {
                return resources.toArray(new XAResource[0]);
            }
        });
        for (int pass = 0; pass < PASSES; pass++) {
            manager.scan();
        }
    }
}
