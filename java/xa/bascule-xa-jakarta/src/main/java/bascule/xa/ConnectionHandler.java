package bascule.xa;

import jakarta.jms.JMSException;
import jakarta.jms.Session;
import jakarta.jms.XASession;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.qpid.jms.JmsConnection;
import org.apache.qpid.jms.JmsSession;

/** An {@code XAConnection}: a connection of Qpid JMS that also makes XA sessions. */
final class ConnectionHandler extends DelegatingHandler {
    private final Connector connector;
    private final JmsConnection connection;
    private final Interruptions interruptions = new Interruptions();
    private final Set<BranchResource> resources = ConcurrentHashMap.newKeySet();

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
        switch (method.getName()) {
            case "createXASession":
                return session();
            case "close":
                resources.forEach(BranchResource::leaveHandedOver); // Qpid JMS would try to roll the transactions of branches back
                return delegate(method, arguments);
            default:
                return delegate(method, arguments);
        }
    }

    private XASession session() throws JMSException {
        JmsSession session = (JmsSession) connection.createSession(true, Session.SESSION_TRANSACTED);
        BranchSession branches = new BranchSession(session);
        Management management = new Management(connection, interruptions, connector);
        BranchResource resource = new BranchResource(branches, management);
        resources.add(resource);
        SessionHandler handler = new SessionHandler(branches, management, resource, () -> resources.remove(resource));
        return (XASession) Proxy.newProxyInstance(XASession.class.getClassLoader(), new Class<?>[] {XASession.class}, handler);
    }
}
