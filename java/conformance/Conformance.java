import java.io.PrintStream;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * Several hundred cases that check the promises of Jakarta Messaging with Apache Qpid JMS as the client. Each case has its own destinations.
 *
 * <pre>java -cp CLASSES:JARS Conformance --url amqp://127.0.0.1:5672 [--user NAME --password WORD] [--threads 8] [--only PREFIX[,PREFIX]]
 * java -cp CLASSES:JARS Conformance --list</pre>
 *
 * Standard output has a JSON line per case: {"id", "ok", "ms", "message"}. The sources use jakarta.jms. With javax.jms
 * instead, they compile against the 1.x line of the client.
 */
public final class Conformance {
    static final PrintStream OUT = System.out;

    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = new java.util.HashMap<>();
        for (int i = 0; i < arguments.length; i++) {
            if (arguments[i].equals("--list")) options.put("list", "");
            else options.put(arguments[i].substring(2), arguments[++i]);
        }
        List<Suite.Entry> cases = new ArrayList<>();
        for (Suite suite : suites()) cases.addAll(suite.entries());
        if (options.containsKey("list")) {
            for (Suite.Entry each : cases) OUT.println(each.id());
            return;
        }
        if (options.containsKey("only")) {
            List<String> prefixes = List.of(options.get("only").split(","));
            cases.removeIf(each -> prefixes.stream().noneMatch(each.id()::startsWith));
        }
        try (jakarta.jms.Connection connection = new Case(options, "").factory().createConnection()) {
            connection.start(); // an unreachable broker is reported once, not for each case
        }
        int threads = Integer.parseInt(options.getOrDefault("threads", "8"));
        System.exit(new Conformance(options).run(cases, threads) ? 0 : 1);
    }

    static List<Suite> suites() {
        return List.of(new Bodies(), new Conversions(), new Headers(), new Properties(), new Selectors(), new Queues(), new Listeners(),
                new Browsers(), new Topics(), new Wildcards(), new Acknowledging(), new Transactions(), new Delivery(), new Connections(),
                new Simplified(), new Large());
    }

    final Map<String, String> options;
    /** Distinguishes the destinations of this run from those of an earlier run on the same broker. */
    final String run = Long.toString(System.nanoTime(), 36);
    final ExecutorService bodies = Executors.newCachedThreadPool(Conformance::daemon);

    Conformance(Map<String, String> options) {
        this.options = options;
    }

    /** Cases that need an idle machine run after all others, one by one. */
    boolean run(List<Suite.Entry> cases, int threads) throws Exception {
        boolean ok = run(cases.stream().filter(each -> !each.alone()).toList(), Executors.newFixedThreadPool(threads, Conformance::daemon));
        return run(cases.stream().filter(Suite.Entry::alone).toList(), Executors.newSingleThreadExecutor(Conformance::daemon)) && ok;
    }

    private boolean run(List<Suite.Entry> cases, ExecutorService pool) throws Exception {
        List<Future<Boolean>> results = new ArrayList<>();
        for (Suite.Entry each : cases) results.add(pool.submit(() -> run(each)));
        boolean ok = true;
        for (Future<Boolean> each : results) ok &= each.get();
        return ok;
    }

    boolean run(Suite.Entry entry) {
        long started = System.nanoTime();
        Case one = new Case(options, "c." + run + "." + entry.id());
        Thread[] runner = new Thread[1];
        Future<?> body = bodies.submit(() -> {
            runner[0] = Thread.currentThread();
            entry.body().run(one);
            return null;
        });
        String message = null;
        try {
            body.get(entry.limitS(), TimeUnit.SECONDS);
        } catch (TimeoutException late) {
            message = "no end within " + entry.limitS() + " s, at " + where(runner[0]);
            body.cancel(true);
        } catch (ExecutionException failed) {
            Throwable cause = failed.getCause();
            String kind = cause instanceof Check.Failed ? "" : cause.getClass().getSimpleName() + ": ";
            message = kind + cause.getMessage() + at(cause.getStackTrace());
        } catch (InterruptedException interrupted) {
            throw new java.lang.IllegalStateException(interrupted);
        }
        one.close();
        report(entry.id(), message, TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - started));
        return message == null;
    }

    static String where(Thread thread) {
        return thread == null ? "its start" : at(thread.getStackTrace()).trim();
    }

    /** Returns the line of a suite that was running; a suite is a file of the unnamed package. */
    static String at(StackTraceElement[] trace) {
        for (StackTraceElement each : trace) {
            String type = each.getClassName();
            boolean ours = type.indexOf('.') < 0 && !type.startsWith("Case") && !type.startsWith("Check");
            if (ours) return " (" + each.getFileName() + ":" + each.getLineNumber() + ")";
        }
        return "";
    }

    static synchronized void report(String id, String message, long ms) {
        StringBuilder line = new StringBuilder("{\"id\":\"").append(id).append("\",\"ok\":").append(message == null);
        line.append(",\"ms\":").append(ms).append(",\"message\":\"");
        for (char each : (message == null ? "" : message).toCharArray()) {
            if (each == '"' || each == '\\') line.append('\\').append(each);
            else if (each < ' ' || each > '~') line.append(String.format("\\u%04x", (int) each));
            else line.append(each);
        }
        OUT.println(line.append("\"}"));
        OUT.flush();
    }

    static Thread daemon(Runnable work) {
        Thread thread = new Thread(work);
        thread.setDaemon(true);
        return thread;
    }
}
