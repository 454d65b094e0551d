package bascule.xa;

import jakarta.jms.JMSException;
import jakarta.jms.Session;
import jakarta.jms.XASession;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import org.apache.qpid.jms.JmsConnection;
import org.apache.qpid.jms.JmsSession;

/** An {@code XAConnection}: a connection of Qpid JMS that also makes XA sessions. */
final class ConnectionHandler extends DelegatingHandler {
    private final Connector connector;
    private final JmsConnection connection;
    private final Interruptions interruptions = new Interruptions();

    ConnectionHandler(Connector connector) throws JMSException {
        this(connector, connector.connect());
    }

    private ConnectionHandler(Connector connector, JmsConnection connection) {
        super(connection);
        this.connector = connector;
        this.connection = connection;
        connection.addConnectionListener(interruptions);
    }

    @Override
    Object handle(Object proxy, Method method, Object[] arguments) throws Throwable {
        return method.getName().equals("createXASession") ? session() : delegate(method, arguments);
    }

    private XASession session() throws JMSException {
        JmsSession session = (JmsSession) connection.createSession(true, Session.SESSION_TRANSACTED);
        BranchSession branches = new BranchSession(session);
        Management management = new Management(connection, interruptions, connector);
        SessionHandler handler = new SessionHandler(branches, management);
        return (XASession) Proxy.newProxyInstance(XASession.class.getClassLoader(), new Class<?>[] {XASession.class}, handler);
    }
}
