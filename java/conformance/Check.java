import java.util.Objects;

/** The assertions of cases. */
final class Check {
    static final class Failed extends AssertionError {
        Failed(String message) {
            super(message);
        }
    }

    interface Action {
        void run() throws Exception;
    }

    private Check() {}

    static void that(boolean holds, String what) {
        if (!holds) throw new Failed("not so: " + what);
    }

    static void equal(Object expected, Object actual) {
        if (!Objects.deepEquals(expected, actual)) throw new Failed("expected " + said(expected) + ", got " + said(actual));
    }

    static void none(Object actual) {
        if (actual != null) throw new Failed("expected nothing, got " + said(actual));
    }

    /** Checks that an action throws an exception of this class. */
    static <T extends Throwable> T fails(Class<T> with, Action action) {
        try {
            action.run();
        } catch (Throwable error) {
            if (with.isInstance(error)) return with.cast(error);
            throw new Failed("expected " + with.getSimpleName() + ", got " + error);
        }
        throw new Failed("expected " + with.getSimpleName() + ", and nothing was thrown");
    }

    private static String said(Object value) {
        String text = value instanceof byte[] bytes ? java.util.HexFormat.of().formatHex(bytes) : String.valueOf(value);
        String shown = text.length() > 200 ? text.substring(0, 200) + "..." : text;
        return value == null ? shown : value.getClass().getSimpleName() + " " + shown;
    }
}
