package bascule.xa;

import javax.transaction.xa.XAException;

/** Creates the errors of a resource. The constructors of XAException take a code or a text, but not both. */
final class Failure {
    private Failure() {}

    static XAException of(int code, String message) {
        return of(code, message, null);
    }

    static XAException of(int code, String message, Throwable cause) {
        XAException failure = new XAException(message);
        failure.errorCode = code;
        failure.initCause(cause);
        return failure;
    }
}
