package bascule.xa;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.util.List;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;
import org.junit.jupiter.api.Test;

/** A session that works in several branches by turns, with a real broker. */
class SuspendTest extends BranchTestBase {
    @Test
    void sessionWorksInAnotherBranchWhileItsBranchIsSuspended() throws Exception {
        Xid outer = suspended();
        Xid inner = ended("inner");
        resource.commit(inner, true);
        assertEquals(List.of("inner"), shop.waiting());
        resource.start(outer, XAResource.TMRESUME);
        bill("more");
        resource.end(outer, XAResource.TMSUCCESS);
        assertEquals(XAResource.XA_OK, resource.prepare(outer));
        assertEquals(List.of("inner"), shop.waiting());
        resource.commit(outer, false);
        assertEquals(List.of("inner", "bill of order", "more"), shop.waiting());
    }

    @Test
    void branchesThatHaveEndedArePreparedInAnyOrderByAnyResource() throws Exception {
        Xid first = ended("first");
        Xid second = ended("second");
        Xid third = billed("third");
        assertEquals(XAResource.XA_OK, resource.prepare(second));
        XAResource other = shop.connection.createXASession().getXAResource();
        assertEquals(XAResource.XA_OK, other.prepare(first));
        resource.end(third, XAResource.TMSUCCESS);
        assertEquals(XAResource.XA_OK, resource.prepare(third));
        assertEquals(BEFORE, shop.waiting());
        other.commit(third, false);
        resource.commit(first, false);
        resource.rollback(second);
        assertEquals(List.of("order", "third", "first"), shop.waiting());
    }

    @Test
    void branchThatWasLeftIsRolledBackAndItsMessageIsRedelivered() throws Exception {
        Xid outer = suspended();
        Xid inner = billed("inner");
        assertEquals(List.of(), shop.waiting());
        resource.rollback(outer);
        assertEquals(BEFORE, shop.waiting());
        assertCode(XAException.XAER_NOTA, () -> resource.start(outer, XAResource.TMRESUME));
        shop.deliver();
        resource.end(inner, XAResource.TMSUCCESS);
        resource.commit(inner, true);
        assertEquals(List.of("inner", "bill of order"), shop.waiting());
    }

    @Test
    void branchThatWasLeftIsEndedWithoutItsSession() throws Exception {
        Xid outer = suspended();
        Xid inner = billed("inner");
        assertCode(XAException.XAER_PROTO, () -> resource.prepare(outer));
        assertCode(XAException.XAER_PROTO, () -> resource.start(outer, XAResource.TMRESUME));
        resource.end(outer, XAResource.TMSUCCESS);
        resource.commit(outer, true);
        bill("of the inner branch");
        resource.end(inner, XAResource.TMSUCCESS);
        resource.rollback(inner);
        assertEquals(List.of("bill of order"), shop.waiting());
    }

    @Test
    void sessionReturnsToEachOfTwoBranchesInTurn() throws Exception {
        Xid first = billed("first 0");
        resource.end(first, XAResource.TMSUSPEND);
        Xid second = billed("second 0");
        resource.end(second, XAResource.TMSUSPEND);
        for (int i = 1; i < 3; i++) {
            resource.start(first, XAResource.TMRESUME);
            bill("first " + i);
            resource.end(first, XAResource.TMSUSPEND);
            resource.start(second, XAResource.TMRESUME);
            bill("second " + i);
            resource.end(second, XAResource.TMSUSPEND);
        }
        resource.end(second, XAResource.TMSUCCESS);
        resource.end(first, XAResource.TMSUCCESS);
        resource.commit(first, true);
        assertEquals(List.of("order", "first 0", "first 1", "first 2"), shop.waiting());
        resource.rollback(second);
        assertEquals(List.of("order", "first 0", "first 1", "first 2"), shop.waiting());
    }

    @Test
    void branchThatWasLeftIsRolledBackAtItsTimeout() throws Exception {
        resource.setTransactionTimeout(1);
        Xid outer = suspended();
        resource.setTransactionTimeout(0);
        Xid inner = billed("inner");
        shop.awaitWaiting(BEFORE);
        resource.end(inner, XAResource.TMSUCCESS);
        resource.commit(inner, true);
        assertCode(XAException.XA_RBTIMEOUT, () -> resource.start(outer, XAResource.TMRESUME));
        resource.rollback(outer);
        assertEquals(List.of("order", "inner"), shop.waiting());
    }

    @Test
    void branchThatWasLeftEndsWithItsConnection() throws Exception {
        suspended();
        billed("inner");
        shop.connection.close();
        assertEquals(BEFORE, shop.waiting());
    }
}
