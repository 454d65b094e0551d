package bascule.xa;

/** No answer came to a request: the broker may have carried it out or not. */
final class AnswerLost extends Exception {
    private static final long serialVersionUID = 1L;

    AnswerLost(String message, Throwable cause) {
        super(message, cause);
    }
}
