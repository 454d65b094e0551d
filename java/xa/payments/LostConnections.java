package bascule.payments;

import java.lang.reflect.InvocationHandler;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import java.sql.SQLException;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;

/**
 * Reports to a transaction manager with XAER_RMFAIL that PostgreSQL has ended a connection.
 *
 * <p>The driver itself answers XAER_RMERR. Narayana considers that a heuristic outcome, which waits for an operator. After XAER_RMFAIL its
 * recovery tries again.
 */
final class LostConnections implements InvocationHandler {
    /** "Operator intervention": the server shuts down, has crashed, or ends the connection. */
    private static final String ENDED_BY_SERVER = "57P";

    private final XAResource target;

    private LostConnections(XAResource target) {
        this.target = target;
    }

    static XAResource told(XAResource target) {
        Class<?>[] interfaces = {XAResource.class};
        return (XAResource) Proxy.newProxyInstance(XAResource.class.getClassLoader(), interfaces, new LostConnections(target));
    }

    @Override
    public Object invoke(Object proxy, Method method, Object[] arguments) throws Throwable {
        try {
            return method.invoke(target, arguments);
        } catch (InvocationTargetException wrapped) {
            throw told(wrapped.getCause());
        }
    }

    private static Throwable told(Throwable failure) {
        if (failure instanceof XAException && ((XAException) failure).errorCode == XAException.XAER_RMERR && isLost(failure.getCause())) {
            XAException told = new XAException(XAException.XAER_RMFAIL);
            told.initCause(failure);
            return told;
        }
        return failure;
    }

    private static boolean isLost(Throwable cause) {
        String state = cause instanceof SQLException ? ((SQLException) cause).getSQLState() : null;
        return state != null && state.startsWith(ENDED_BY_SERVER);
    }
}
