package bascule.xa;

import java.util.concurrent.Future;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.TimeUnit;

/** The timer of all branches. Its thread ends when no branch with a timeout is open. */
final class Timeouts {
    private static final String NAME = "bascule-xa-timeout";
    private static final long IDLE_SECONDS = 10;
    private static final ScheduledThreadPoolExecutor TIMER = new ScheduledThreadPoolExecutor(1, Timeouts::thread);

    static {
        TIMER.setKeepAliveTime(IDLE_SECONDS, TimeUnit.SECONDS);
        TIMER.allowCoreThreadTimeOut(true);
        TIMER.setRemoveOnCancelPolicy(true);
    }

    private Timeouts() {}

    /** Calls an action after a number of seconds, in a thread of its own: a branch whose broker does not answer delays no other branch. */
    static Future<?> after(int seconds, Runnable action) {
        return TIMER.schedule(() -> thread(action).start(), seconds, TimeUnit.SECONDS);
    }

    private static Thread thread(Runnable action) {
        Thread thread = new Thread(action, NAME);
        thread.setDaemon(true);
        return thread;
    }
}
