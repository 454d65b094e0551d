package bascule.xa;

import jakarta.jms.IllegalStateException;
import jakarta.jms.JMSException;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.TransactionInProgressException;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;

/** An {@code XASession}: it sends and receives only within the branch that its {@code XAResource} has started. */
final class SessionHandler extends DelegatingHandler {
    private final BranchSession session;
    private final Management management;
    private final BranchResource resource;
    private final Runnable closed;

    SessionHandler(BranchSession session, Management management, BranchResource resource, Runnable closed) {
        super(session.session());
        this.session = session;
        this.management = management;
        this.resource = resource;
        this.closed = closed;
    }

    @Override
    Object handle(Object proxy, Method method, Object[] arguments) throws Throwable {
        switch (method.getName()) {
            case "getXAResource":
                return resource;
            case "getSession":
                return proxy;
            case "commit":
            case "rollback":
                throw new TransactionInProgressException(method.getName() + "() is refused: the transaction manager controls commit and rollback");
            case "recover":
                throw new IllegalStateException("recover() is not possible on a transacted session");
            case "getMessageListener":
                return null;
            case "setMessageListener":
                throw noListener();
            case "close":
                resource.leaveHandedOver();
                management.close();
                session.close();
                closed.run();
                return null;
            default:
                return guarded(method.getReturnType(), delegate(method, arguments));
        }
    }

    /** Wraps the objects that send or receive. */
    private Object guarded(Class<?> type, Object result) {
        if (!MessageProducer.class.isAssignableFrom(type) && !MessageConsumer.class.isAssignableFrom(type)) {
            return result;
        }
        return Proxy.newProxyInstance(type.getClassLoader(), new Class<?>[] {type}, new LinkHandler(result));
    }

    private static JMSException noListener() {
        return new IllegalStateException("a message listener cannot take part in a transaction; call receive() within the transaction");
    }

    /** A producer or a consumer of the session. */
    private final class LinkHandler extends DelegatingHandler {
        LinkHandler(Object target) {
            super(target);
        }

        @Override
        Object handle(Object proxy, Method method, Object[] arguments) throws Throwable {
            switch (method.getName()) {
                case "send":
                case "publish":
                case "receive":
                case "receiveNoWait":
                    session.enter();
                    try {
                        return delegate(method, arguments);
                    } finally {
                        session.leave();
                    }
                case "setMessageListener":
                    throw noListener();
                default:
                    return delegate(method, arguments);
            }
        }
    }
}
