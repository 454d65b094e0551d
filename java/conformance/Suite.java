import java.util.ArrayList;
import java.util.List;

/**
 * Cases of one subject, each named by the first argument of the line that adds it: subject.what-is-so.
 * Whoever lists the cases without running them reads these lines.
 */
abstract class Suite {
    /** A case that passes takes some hundredths of a second; this is what a machine that does other things may make of it. */
    static final int LIMIT_S = 60;

    interface Body {
        void run(Case c) throws Exception;
    }

    record Entry(String id, int limitS, boolean alone, Body body) {}

    private final List<Entry> entries = new ArrayList<>();

    final List<Entry> entries() {
        return entries;
    }

    final void it(String id, Body body) {
        entries.add(new Entry(id, LIMIT_S, false, body));
    }

    /** A case that needs the machine, or something of which there is one, for itself. */
    final void alone(String id, int limitS, Body body) {
        entries.add(new Entry(id, limitS, true, body));
    }
}
