package bascule.payments;

import bascule.xa.BasculeXAConnectionFactory;
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
import jakarta.jms.TextMessage;
import jakarta.jms.XAConnection;
import jakarta.jms.XASession;
import jakarta.transaction.Transaction;
import jakarta.transaction.TransactionManager;
import java.sql.PreparedStatement;
import java.util.List;
import javax.transaction.xa.XAResource;
import org.postgresql.xa.PGXADataSource;

/**
 * Takes an order from a queue, writes a row into PostgreSQL and sends a bill, in one JTA transaction of Narayana.
 *
 * <p>{@code Payments pay|fail|recover BROKER_URL JDBC_URL DIRECTORY NAME [POINT]}: the queues are {@code NAME.orders} and {@code NAME.bills},
 * the table is {@code NAME}; see {@link PausingResource} for the point.
 */
public final class Payments {
    private static final String NODE = "shop";
    private static final int TIMEOUT_S = 120;
    private static final long RECEIVE_MS = 60_000;
    /** One pass over branches in doubt that the log does not know, and one that finds them old enough. */
    private static final int PASSES = 2;

    private final String brokerUrl;
    private final String name;
    private final PGXADataSource database = new PGXADataSource();

    private Payments(String brokerUrl, String jdbcUrl, String name) {
        this.brokerUrl = brokerUrl;
        this.name = name;
        database.setUrl(jdbcUrl);
    }

    public static void main(String[] arguments) throws Exception {
        configure(arguments[3]);
        Payments payments = new Payments(arguments[1], arguments[2], arguments[4]);
        if (arguments[0].equals("recover")) {
            payments.recover();
        } else {
            payments.pay(arguments[0].equals("fail"), arguments.length > 5 ? arguments[5] : "");
        }
        System.exit(0); // Narayana's reaper is no daemon
    }

    private static void configure(String directory) throws Exception {
        BeanPopulator.getDefaultInstance(CoreEnvironmentBean.class).setNodeIdentifier(NODE);
        for (String store : new String[] {null, "communicationStore", "stateStore"}) {
            BeanPopulator.getNamedInstance(ObjectStoreEnvironmentBean.class, store).setObjectStoreDir(directory);
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

    private void pay(boolean fails, String point) throws Exception {
        TransactionManager manager = com.arjuna.ats.jta.TransactionManager.transactionManager();
        var rows = database.getXAConnection();
        try (XAConnection messages = new BasculeXAConnectionFactory(brokerUrl).createXAConnection()) {
            XASession session = messages.createXASession();
            messages.start();
            manager.setTransactionTimeout(TIMEOUT_S);
            manager.begin();
            Transaction transaction = manager.getTransaction();
            transaction.enlistResource(new PausingResource("database", rows.getXAResource(), point));
            transaction.enlistResource(new PausingResource("jms", session.getXAResource(), point));
            TextMessage order = (TextMessage) session.createConsumer(session.createQueue(name + ".orders")).receive(RECEIVE_MS);
            try (PreparedStatement insert = rows.getConnection().prepareStatement("INSERT INTO " + name + " VALUES (?)")) {
                insert.setString(1, order.getText());
                insert.executeUpdate();
            }
            session.createProducer(session.createQueue(name + ".bills")).send(session.createTextMessage(order.getText()));
            if (fails) {
                manager.rollback();
            } else {
                manager.commit();
            }
            System.out.println("done");
        }
    }

    private void recover() throws Exception {
        RecoveryManager manager = RecoveryManager.manager(RecoveryManager.DIRECT_MANAGEMENT);
        manager.initialize();
        var rows = database.getXAConnection();
        try (XAConnection messages = new BasculeXAConnectionFactory(brokerUrl).createXAConnection()) {
            XAResource[] resources = {rows.getXAResource(), messages.createXASession().getXAResource()};
            XARecoveryModule.getRegisteredXARecoveryModule().addXAResourceRecoveryHelper(new XAResourceRecoveryHelper() {
                @Override
                public boolean initialise(String properties) {
                    return true;
                }

                @Override
                public XAResource[] getXAResources() {
                    return resources;
                }
            });
            for (int pass = 0; pass < PASSES; pass++) {
                manager.scan();
            }
            System.out.println("done");
        }
    }
}
