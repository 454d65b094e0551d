package bascule.xa;

import java.lang.reflect.Method;

/** Implements the interface of a connection or a context, whose {@code start} and {@code stop} do not disturb requests of the resource. */
abstract class StartableHandler extends DelegatingHandler {
    private final ConnectionStart start;

    StartableHandler(Object target, ConnectionStart start) {
        super(target);
        this.start = start;
    }

    /** Starts or stops the connection, and calls the Qpid JMS object for all other methods. */
    @Override
    Object handle(Object proxy, Method method, Object[] arguments) throws Throwable {
        switch (method.getName()) {
            case "start":
                start.start();
                return null;
            case "stop":
                start.stop();
                return null;
            default:
                return delegate(method, arguments);
        }
    }

    final ConnectionStart connectionStart() {
        return start;
    }
}
