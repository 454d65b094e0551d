import java.util.ArrayList;
import java.util.List;

/**
 * Cases of one subject. The first argument of the line that adds a case is its id: subject.statement. Tests read these lines to list the
 * cases without running them.
 */
abstract class Suite {
    /** Time limit of a case. A case takes some hundredths of a second; the limit allows for other work of the machine. */
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

    /** Adds a case that must run alone, because it needs the whole machine or an exclusive resource. */
    final void alone(String id, int limitS, Body body) {
        entries.add(new Entry(id, limitS, true, body));
    }
}
