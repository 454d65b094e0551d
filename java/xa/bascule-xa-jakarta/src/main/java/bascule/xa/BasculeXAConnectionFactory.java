package bascule.xa;

import jakarta.jms.JMSException;
import jakarta.jms.XAConnection;
import jakarta.jms.XAConnectionFactory;
import jakarta.jms.XAJMSContext;
import java.util.Objects;
import org.apache.qpid.jms.JmsConnection;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.apache.qpid.jms.exceptions.JmsExceptionSupport;

/**
 * Makes connections of Qpid JMS whose sessions take part in JTA transactions, with a Bascule broker as the resource manager.
 *
 * <p>Every option of Qpid JMS works: give the options in the URL, or configure a {@link JmsConnectionFactory} and pass it.
 */
public final class BasculeXAConnectionFactory implements XAConnectionFactory {
    private final JmsConnectionFactory factory;
    private final KnownBranches known = new KnownBranches();

    /** Connects to a URL of Qpid JMS, such as {@code failover:(amqp://one:5672,amqp://two:5672)}. */
    public BasculeXAConnectionFactory(String url) {
        this(new JmsConnectionFactory(url));
    }

    /** Connects as a factory of Qpid JMS does. */
    public BasculeXAConnectionFactory(JmsConnectionFactory factory) {
        this.factory = Objects.requireNonNull(factory);
    }

    @Override
    public XAConnection createXAConnection() throws JMSException {
        return handler(configured()).connection();
    }

    @Override
    public XAConnection createXAConnection(String user, String password) throws JMSException {
        return handler(login(user, password)).connection();
    }

    @Override
    public XAJMSContext createXAContext() {
        return context(configured());
    }

    @Override
    public XAJMSContext createXAContext(String user, String password) {
        return context(login(user, password));
    }

    private Connector configured() {
        return () -> (JmsConnection) factory.createConnection();
    }

    private Connector login(String user, String password) {
        return () -> (JmsConnection) factory.createConnection(user, password);
    }

    private ConnectionHandler handler(Connector connector) throws JMSException {
        return new ConnectionHandler(connector, known);
    }

    private XAJMSContext context(Connector connector) {
        try {
            return handler(connector).context();
        } catch (JMSException failure) {
            throw JmsExceptionSupport.createRuntimeException(failure);
        }
    }
}
