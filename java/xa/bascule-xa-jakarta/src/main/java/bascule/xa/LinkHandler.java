package bascule.xa;

import jakarta.jms.IllegalStateException;
import jakarta.jms.JMSException;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import org.apache.qpid.jms.exceptions.JmsExceptionSupport;

/** A producer or a consumer of an XA session: it sends and receives only within the branch of the session. */
final class LinkHandler extends DelegatingHandler {
    private final BranchSession session;
    private final boolean simplified;

    private LinkHandler(Object target, BranchSession session, boolean simplified) {
        super(target);
        this.session = session;
        this.simplified = simplified;
    }

    /** Returns a producer or a consumer of the classic API. */
    static Object guarded(Class<?> type, Object target, BranchSession session) {
        return proxy(type, new LinkHandler(target, session, false));
    }

    /** Returns a JMSProducer or a JMSConsumer, whose errors are unchecked. */
    static Object simplified(Class<?> type, Object target, BranchSession session) {
        return proxy(type, new LinkHandler(target, session, true));
    }

    private static Object proxy(Class<?> type, LinkHandler handler) {
        return Proxy.newProxyInstance(type.getClassLoader(), new Class<?>[] {type}, handler);
    }

    static JMSException noListener() {
        return new IllegalStateException("a message listener cannot take part in a transaction; call receive() within the transaction");
    }

    @Override
    Object handle(Object proxy, Method method, Object[] arguments) throws Throwable {
        try {
            Object result = carryOut(method, arguments);
            return result == target() ? proxy : result; // the methods of a JMSProducer return it
        } catch (JMSException failure) {
            throw simplified ? JmsExceptionSupport.createRuntimeException(failure) : failure;
        }
    }

    private Object carryOut(Method method, Object[] arguments) throws Throwable {
        switch (method.getName()) {
            case "send":
            case "publish":
            case "receive":
            case "receiveNoWait":
            case "receiveBody":
            case "receiveBodyNoWait":
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
