package bascule.xa;

import jakarta.jms.JMSException;
import jakarta.jms.Session;
import jakarta.jms.XAConnection;
import jakarta.jms.XAJMSContext;
import jakarta.jms.XASession;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.qpid.jms.JmsConnection;
import org.apache.qpid.jms.JmsSession;

/** An {@code XAConnection}: a connection of Qpid JMS that also makes XA sessions. */
final class ConnectionHandler extends StartableHandler {
    private final Connector connector;
    private final KnownBranches known;
    private final JmsConnection connection;
    private final Interruptions interruptions = new Interruptions();
    private final Set<BranchResource> resources = ConcurrentHashMap.newKeySet();

    ConnectionHandler(Connector connector, KnownBranches known) throws JMSException {
        this(connector, known, connector.connect());
    }

    private ConnectionHandler(Connector connector, KnownBranches known, JmsConnection connection) {
        super(connection, new ConnectionStart(connection));
        this.connector = connector;
        this.known = known;
        this.connection = connection;
        connection.addConnectionListener(interruptions);
    }

    XAConnection connection() {
        Class<?>[] interfaces = {XAConnection.class};
        return (XAConnection) Proxy.newProxyInstance(XAConnection.class.getClassLoader(), interfaces, this);
    }

    /** Returns a context with the only XA session of the connection. Closes the connection if that fails. */
    XAJMSContext context() throws JMSException {
        try {
            BranchSession branches = newSession();
            return ContextHandler.create(connection, connectionStart(), branches, session(branches));
        } catch (JMSException | RuntimeException failure) {
            connection.close();
            throw failure;
        }
    }

    @Override
    Object handle(Object proxy, Method method, Object[] arguments) throws Throwable {
        switch (method.getName()) {
            case "createXASession":
                return session(newSession());
            case "close":
                resources.forEach(BranchResource::close); // Qpid JMS would try to roll the transactions of branches back
                return delegate(method, arguments);
            default:
                return super.handle(proxy, method, arguments);
        }
    }

    private BranchSession newSession() throws JMSException {
        return new BranchSession((JmsSession) connection.createSession(true, Session.SESSION_TRANSACTED));
    }

    private XASession session(BranchSession branches) {
        Management management = new Management(connection, connectionStart(), interruptions, connector);
        BranchResource resource = new BranchResource(connection, branches, management, known);
        resources.add(resource);
        SessionHandler handler = new SessionHandler(branches, management, resource, () -> resources.remove(resource));
        return (XASession) Proxy.newProxyInstance(XASession.class.getClassLoader(), new Class<?>[] {XASession.class}, handler);
    }
}
