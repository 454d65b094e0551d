package bascule.xa;

/** Thrown if a request got no answer: the broker may have processed it or not. */
final class AnswerLost extends Exception {
    private static final long serialVersionUID = 1L;

    AnswerLost(String message, Throwable cause) {
        super(message, cause);
    }
}
