package bascule.xa;

import java.lang.reflect.InvocationHandler;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;

/** Implements a JMS interface with an object of Qpid JMS, except for the methods that a subclass handles. */
abstract class DelegatingHandler implements InvocationHandler {
    private final Object target;

    DelegatingHandler(Object target) {
        this.target = target;
    }

    @Override
    public final Object invoke(Object proxy, Method method, Object[] arguments) throws Throwable {
        if (method.getDeclaringClass() == Object.class) {
            return method.getName().equals("equals") ? (Object) (proxy == arguments[0]) : delegate(method, arguments);
        }
        return handle(proxy, method, arguments);
    }

    abstract Object handle(Object proxy, Method method, Object[] arguments) throws Throwable;

    /** Returns the Qpid JMS object. */
    final Object target() {
        return target;
    }

    /** Calls the method of the Qpid JMS object. */
    final Object delegate(Method method, Object[] arguments) throws Throwable {
        try {
            return implementation(method).invoke(target, arguments);
        } catch (InvocationTargetException failure) {
            throw failure.getCause();
        }
    }

    /** The XA interfaces declare again some methods that Qpid JMS implements for the plain interfaces. */
    private Method implementation(Method method) throws NoSuchMethodException {
        boolean implemented = method.getDeclaringClass().isInstance(target);
        return implemented ? method : target.getClass().getMethod(method.getName(), method.getParameterTypes());
    }
}
