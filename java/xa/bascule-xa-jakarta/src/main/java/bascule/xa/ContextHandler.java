package bascule.xa;

import jakarta.jms.JMSConsumer;
import jakarta.jms.JMSException;
import jakarta.jms.JMSProducer;
import jakarta.jms.Session;
import jakarta.jms.XAJMSContext;
import jakarta.jms.XASession;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import org.apache.qpid.jms.JmsConnection;
import org.apache.qpid.jms.JmsConsumer;
import org.apache.qpid.jms.JmsContext;
import org.apache.qpid.jms.JmsMessageConsumer;
import org.apache.qpid.jms.JmsMessageProducer;
import org.apache.qpid.jms.JmsProducer;
import org.apache.qpid.jms.JmsSession;
import org.apache.qpid.jms.exceptions.JmsExceptionSupport;

/**
 * An {@code XAJMSContext}: a connection with one XA session.
 *
 * <p>A context of Qpid JMS has the methods that concern the connection. It never makes a session of its own, and closes the connection after
 * the last context that shares it.
 */
final class ContextHandler extends StartableHandler {
    private final JmsContext context;
    private final BranchSession branches;
    private final JmsSession qpidSession;
    private final XASession session;
    private JmsMessageProducer producer;

    private ContextHandler(JmsContext context, ConnectionStart start, BranchSession branches, XASession session) {
        super(context, start);
        this.context = context;
        this.branches = branches;
        this.qpidSession = branches.session();
        this.session = session;
    }

    static XAJMSContext create(JmsConnection connection, ConnectionStart start, BranchSession branches, XASession session) {
        JmsContext context = new JmsContext(connection, Session.SESSION_TRANSACTED);
        ContextHandler handler = new ContextHandler(context, start, branches, session);
        return (XAJMSContext) Proxy.newProxyInstance(XAJMSContext.class.getClassLoader(), new Class<?>[] {XAJMSContext.class}, handler);
    }

    @Override
    Object handle(Object proxy, Method method, Object[] arguments) throws Throwable {
        try {
            return carryOut(proxy, method, arguments);
        } catch (JMSException failure) {
            throw JmsExceptionSupport.createRuntimeException(failure);
        }
    }

    private Object carryOut(Object proxy, Method method, Object[] arguments) throws Throwable {
        switch (method.getName()) {
            case "getContext":
                return proxy;
            case "acknowledge": // has no effect on a transacted session
                return null;
            case "close":
                session.close();
                context.close();
                return null;
            case "createProducer":
                return LinkHandler.simplified(JMSProducer.class, new JmsProducer(qpidSession, sharedProducer()), branches);
            case "createConsumer":
            case "createDurableConsumer":
            case "createSharedConsumer":
            case "createSharedDurableConsumer":
                JmsMessageConsumer consumer = (JmsMessageConsumer) call(qpidSession, method, arguments);
                startIfWanted();
                return LinkHandler.simplified(JMSConsumer.class, new JmsConsumer(qpidSession, consumer), branches);
            case "createBrowser":
                Object browser = call(session, method, arguments);
                startIfWanted();
                return browser;
            case "start":
            case "stop":
            case "createContext":
            case "getAutoStart":
            case "setAutoStart":
            case "getClientID":
            case "setClientID":
            case "getExceptionListener":
            case "setExceptionListener":
            case "getMetaData":
            case "getSessionMode":
            case "getTransacted":
                return super.handle(proxy, method, arguments);
            default:
                return call(session, method, arguments);
        }
    }

    private void startIfWanted() throws JMSException {
        if (context.getAutoStart()) {
            connectionStart().start();
        }
    }

    private synchronized JmsMessageProducer sharedProducer() throws JMSException {
        if (producer == null) {
            producer = (JmsMessageProducer) qpidSession.createProducer(null);
        }
        return producer;
    }

    /** Calls the method of a session that has the name and the parameters of a method of a context. */
    private static Object call(Session target, Method method, Object[] arguments) throws Throwable {
        try {
            Class<?> type = target instanceof XASession ? XASession.class : Session.class;
            return type.getMethod(method.getName(), method.getParameterTypes()).invoke(target, arguments);
        } catch (InvocationTargetException failure) {
            throw failure.getCause();
        }
    }
}
