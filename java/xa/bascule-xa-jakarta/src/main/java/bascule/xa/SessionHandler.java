package bascule.xa;

import jakarta.jms.IllegalStateException;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.TransactionInProgressException;
import java.lang.reflect.Method;

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
                throw LinkHandler.noListener();
            case "close":
                resource.close();
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
        return LinkHandler.guarded(type, result, session);
    }
}
