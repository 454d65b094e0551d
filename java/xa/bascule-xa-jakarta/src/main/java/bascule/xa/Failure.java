package bascule.xa;

import javax.transaction.xa.XAException;

/** Makes the errors of a resource: XAException's own constructors take a code or a text, never both. */
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
