package bascule.xa;

import java.nio.charset.StandardCharsets;
import java.util.UUID;
import javax.transaction.xa.Xid;

/** New branches for tests. */
final class Branch {
    private Branch() {}

    static Xid create() {
        byte[] gtrid = UUID.randomUUID().toString().getBytes(StandardCharsets.US_ASCII);
        return BranchId.listed("prepared 0 7:" + Hex.of(gtrid) + ":62");
    }
}
