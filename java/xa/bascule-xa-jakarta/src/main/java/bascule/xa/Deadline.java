package bascule.xa;

import java.util.concurrent.TimeUnit;

/** A point in time after which a branch can only be rolled back. */
final class Deadline {
    static final Deadline NONE = new Deadline(0, false);

    private final long atNanos;
    private final boolean set;

    private Deadline(long atNanos, boolean set) {
        this.atNanos = atNanos;
        this.set = set;
    }

    /** Returns the deadline after a number of seconds; none for 0. */
    static Deadline in(int seconds) {
        return seconds == 0 ? NONE : new Deadline(System.nanoTime() + TimeUnit.SECONDS.toNanos(seconds), true);
    }

    boolean isOver() {
        return set && System.nanoTime() - atNanos >= 0;
    }
}
