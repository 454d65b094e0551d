package bascule.payments;

import bascule.xa.BasculeXAConnectionFactory;
import jakarta.jms.JMSException;
import jakarta.jms.TextMessage;
import jakarta.jms.XAConnection;
import jakarta.jms.XASession;
import jakarta.transaction.HeuristicMixedException;
import jakarta.transaction.HeuristicRollbackException;
import jakarta.transaction.RollbackException;
import jakarta.transaction.SystemException;
import jakarta.transaction.TransactionManager;
import java.io.PrintStream;
import java.nio.file.Path;
import java.sql.PreparedStatement;
import java.sql.SQLException;
import java.util.List;
import org.postgresql.xa.PGXADataSource;

/**
 * Receives an order from a queue, writes a row into PostgreSQL and sends a bill, in one JTA transaction of Narayana or Atomikos.
 *
 * <p>{@code Payments pay|fail|recover MANAGER TIMEOUT_S BROKER_URL JDBC_URL DIRECTORY NAME [POINT]}: the queues are {@code NAME.orders} and
 * {@code NAME.bills}, the table is {@code NAME}; see {@link PausingResource} for the point. Prints the outcome of the transaction as JTA
 * reports it.
 */
public final class Payments {
    private static final String COMMITTED = "committed";
    private static final String ROLLED_BACK = "rolled back";
    private static final String IN_DOUBT = "in doubt";
    private static final long RECEIVE_MS = 60_000;
    private static final PrintStream OUTPUT = System.out;

    private final String name;
    private final javax.sql.XAConnection database;
    private final XASession session;
    private final List<PausingResource> resources;
    private final Jta jta;

    private Payments(String[] arguments, XAConnection messages) throws Exception {
        PGXADataSource source = new PGXADataSource();
        source.setUrl(arguments[4]);
        database = source.getXAConnection();
        session = messages.createXASession();
        messages.start();
        name = arguments[6];
        String point = arguments.length > 7 ? arguments[7] : "";
        resources = List.of(
            new PausingResource("database", LostConnections.told(database.getXAResource()), point),
            new PausingResource("jms", session.getXAResource(), point));
        jta = Jta.start(arguments[1], Path.of(arguments[5]), Integer.parseInt(arguments[2]), resources);
    }

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err); // libraries print there
        try (XAConnection messages = new BasculeXAConnectionFactory(arguments[3]).createXAConnection()) {
            Payments payments = new Payments(arguments, messages);
            if (arguments[0].equals("recover")) {
                payments.jta.recover();
                say("recovered");
            } else {
                say(payments.pay(arguments[0].equals("fail")));
            }
        }
        System.exit(0); // transaction managers have threads that are not daemons
    }

    static void say(String line) {
        OUTPUT.println(line);
    }

    private String pay(boolean fails) throws Exception {
        TransactionManager manager = jta.manager();
        manager.begin();
        boolean worked = false;
        try {
            for (PausingResource each : resources) {
                manager.getTransaction().enlistResource(each);
            }
            work();
            worked = true;
        } catch (JMSException | SQLException | RollbackException failure) {
            failure.printStackTrace();
        }
        return worked && !fails ? commit(manager) : rollback(manager);
    }

    private void work() throws JMSException, SQLException {
        TextMessage order = (TextMessage) session.createConsumer(session.createQueue(name + ".orders")).receive(RECEIVE_MS);
        try (PreparedStatement insert = database.getConnection().prepareStatement("INSERT INTO " + name + " VALUES (?)")) {
            insert.setString(1, order.getText());
            insert.executeUpdate();
        }
        session.createProducer(session.createQueue(name + ".bills")).send(session.createTextMessage(order.getText()));
    }

    private static String commit(TransactionManager manager) {
        try {
            manager.commit();
            return COMMITTED;
        } catch (RollbackException failure) {
            failure.printStackTrace();
            return ROLLED_BACK;
        } catch (HeuristicMixedException | HeuristicRollbackException | SystemException failure) {
            failure.printStackTrace();
            return IN_DOUBT;
        }
    }

    private static String rollback(TransactionManager manager) {
        try {
            manager.rollback();
        } catch (SystemException failure) {
            failure.printStackTrace(); // a resource is unavailable; without a decision its branch cannot be committed
        }
        return ROLLED_BACK;
    }
}
