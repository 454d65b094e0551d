package bascule.xa;

import java.util.Arrays;
import javax.transaction.xa.XAException;
import javax.transaction.xa.Xid;

/** An Xid with equality by value. */
final class BranchId implements Xid {
    private final int formatId;
    private final byte[] gtrid;
    private final byte[] bqual;

    private BranchId(int formatId, byte[] gtrid, byte[] bqual) {
        this.formatId = formatId;
        this.gtrid = gtrid;
        this.bqual = bqual;
    }

    static BranchId of(Xid xid) {
        return new BranchId(xid.getFormatId(), xid.getGlobalTransactionId().clone(), xid.getBranchQualifier().clone());
    }

    /** Returns the branch of a call. Throws XAER_INVAL if the call has no valid xid. */
    static BranchId checked(Xid xid, String call) throws XAException {
        byte[] gtrid = xid == null ? null : xid.getGlobalTransactionId();
        byte[] bqual = xid == null ? null : xid.getBranchQualifier();
        boolean valid = gtrid != null && gtrid.length > 0 && gtrid.length <= Xid.MAXGTRIDSIZE && bqual != null
            && bqual.length <= Xid.MAXBQUALSIZE && xid.getFormatId() >= 0;
        if (!valid) {
            throw Failure.of(XAException.XAER_INVAL,
                call + ": invalid xid; use a format id of 0 or more, a global id of 1 to 64 bytes and a qualifier of 0 to 64 bytes");
        }
        return of(xid);
    }

    /** Returns the branch that a line of the broker's list names: {@code STATE SINCE_MS FORMAT:GTRID:BQUAL}. */
    static BranchId listed(String line) {
        String[] parts = line.split(" ")[2].split(":", -1);
        return new BranchId(Integer.parseInt(parts[0]), Hex.parse(parts[1]), Hex.parse(parts[2]));
    }

    @Override
    public int getFormatId() {
        return formatId;
    }

    @Override
    public byte[] getGlobalTransactionId() {
        return gtrid.clone();
    }

    @Override
    public byte[] getBranchQualifier() {
        return bqual.clone();
    }

    @Override
    public boolean equals(Object other) {
        if (!(other instanceof BranchId)) {
            return false;
        }
        BranchId that = (BranchId) other;
        return formatId == that.formatId && Arrays.equals(gtrid, that.gtrid) && Arrays.equals(bqual, that.bqual);
    }

    @Override
    public int hashCode() {
        return 31 * (31 * formatId + Arrays.hashCode(gtrid)) + Arrays.hashCode(bqual);
    }

    @Override
    public String toString() {
        return formatId + ":" + Hex.of(gtrid) + ":" + Hex.of(bqual);
    }
}
