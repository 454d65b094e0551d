package bascule.xa;

import jakarta.jms.JMSException;
import jakarta.jms.JMSRuntimeException;
import jakarta.jms.XAConnection;
import jakarta.jms.XAConnectionFactory;
import jakarta.jms.XAJMSContext;
import java.lang.reflect.Proxy;
import java.util.Objects;
import org.apache.qpid.jms.JmsConnection;
import org.apache.qpid.jms.JmsConnectionFactory;

/**
 * Makes connections of Qpid JMS whose sessions take part in JTA transactions, with a Bascule broker as the resource manager.
 *
 * <p>Every option of Qpid JMS works: give the options in the URL, or configure a {@link JmsConnectionFactory} and pass it.
 */
public final class BasculeXAConnectionFactory implements XAConnectionFactory {
    private final JmsConnectionFactory factory;

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
        return connection(() -> (JmsConnection) factory.createConnection());
    }

    @Override
    public XAConnection createXAConnection(String user, String password) throws JMSException {
        return connection(() -> (JmsConnection) factory.createConnection(user, password));
    }

    @Override
    public XAJMSContext createXAContext() {
        throw noContext();
    }

    @Override
    public XAJMSContext createXAContext(String user, String password) {
        throw noContext();
    }

    private static XAConnection connection(Connector connector) throws JMSException {
        ConnectionHandler handler = new ConnectionHandler(connector);
        Class<?>[] interfaces = {XAConnection.class};
        return (XAConnection) Proxy.newProxyInstance(XAConnection.class.getClassLoader(), interfaces, handler);
    }

    private static JMSRuntimeException noContext() {
        return new JMSRuntimeException("XAJMSContext is not supported; use createXAConnection().createXASession()");
    }
}
