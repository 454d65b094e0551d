package bascule.xa;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import jakarta.jms.JMSException;
import jakarta.jms.Session;
import jakarta.jms.TransactionInProgressException;
import java.util.Arrays;
import java.util.List;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;
import org.junit.jupiter.api.Test;

/** The resource of a session, with a real broker. */
class BrokerTest extends BranchTestBase {
    private static boolean isListed(XAResource resource, Xid xid) throws XAException {
        return Arrays.asList(resource.recover(XAResource.TMSTARTRSCAN | XAResource.TMENDRSCAN)).contains(BranchId.of(xid));
    }

    @Test
    void preparedBranchIsCommittedAndTheSessionWorksInTheNext() throws Exception {
        Xid first = shop.worked();
        assertEquals(XAResource.XA_OK, resource.prepare(first));
        assertEquals(List.of(), shop.waiting());
        assertTrue(isListed(resource, first));
        resource.commit(first, false);
        assertEquals(AFTER, shop.waiting());
        assertFalse(isListed(resource, first));

        Xid second = Branch.create();
        resource.start(second, XAResource.TMNOFLAGS);
        shop.bills.send(shop.session.createTextMessage("another"));
        resource.end(second, XAResource.TMSUCCESS);
        assertEquals(XAResource.XA_OK, resource.prepare(second));
        resource.commit(second, false);
        assertEquals(List.of("bill of order", "another"), shop.waiting());
    }

    @Test
    void preparedBranchIsRolledBackAndTheMessageIsRedelivered() throws Exception {
        Xid xid = shop.worked();
        assertEquals(XAResource.XA_OK, resource.prepare(xid));
        resource.rollback(xid);
        Xid again = shop.worked();
        resource.commit(again, true);
        assertEquals(AFTER, shop.waiting());
    }

    @Test
    void branchIsRolledBackBeforeItIsPrepared() throws Exception {
        Xid xid = shop.worked();
        resource.rollback(xid);
        assertEquals(BEFORE, shop.waiting());
        Xid active = shop.work();
        resource.rollback(active);
        assertEquals(BEFORE, shop.waiting());
    }

    @Test
    void branchIsCommittedInOnePhase() throws Exception {
        resource.commit(shop.worked(), true);
        assertEquals(AFTER, shop.waiting());
    }

    @Test
    void branchWithoutWorkIsReadOnly() throws Exception {
        for (int i = 0; i < 2; i++) {
            Xid xid = Branch.create();
            resource.start(xid, XAResource.TMNOFLAGS);
            resource.end(xid, XAResource.TMSUCCESS);
            assertEquals(XAResource.XA_RDONLY, resource.prepare(xid));
            assertFalse(isListed(resource, xid));
        }
    }

    @Test
    void branchIsSuspendedResumedEndedAndJoined() throws Exception {
        Xid xid = Branch.create();
        resource.start(xid, XAResource.TMNOFLAGS);
        resource.end(xid, XAResource.TMSUSPEND);
        assertThrows(jakarta.jms.IllegalStateException.class, shop::deliver);
        resource.start(xid, XAResource.TMRESUME);
        shop.deliver();
        resource.end(xid, XAResource.TMSUCCESS);
        resource.start(xid, XAResource.TMJOIN);
        shop.bills.send(shop.session.createTextMessage("more"));
        resource.end(xid, XAResource.TMSUSPEND);
        resource.end(xid, XAResource.TMSUCCESS);
        resource.commit(xid, true);
        assertEquals(List.of("bill of order", "more"), shop.waiting());
    }

    @Test
    void failedBranchVotesRollback() throws Exception {
        Xid xid = shop.work();
        resource.end(xid, XAResource.TMFAIL);
        assertCode(XAException.XA_RBROLLBACK, () -> resource.prepare(xid));
        assertEquals(BEFORE, shop.waiting());
    }

    @Test
    void branchThatTakesLongerThanItsTimeoutVotesRollback() throws Exception {
        assertTrue(resource.setTransactionTimeout(1));
        assertEquals(1, resource.getTransactionTimeout());
        Xid xid = Branch.create();
        resource.start(xid, XAResource.TMNOFLAGS);
        Deadline over = Deadline.in(1);
        shop.deliver();
        while (!over.isOver()) {
            Thread.onSpinWait();
        }
        assertThrows(JMSException.class, () -> shop.bills.send(shop.session.createTextMessage("late")));
        resource.end(xid, XAResource.TMSUCCESS);
        assertCode(XAException.XA_RBTIMEOUT, () -> resource.prepare(xid));
        assertEquals(BEFORE, shop.waiting());
        assertCode(XAException.XAER_INVAL, () -> resource.setTransactionTimeout(-1));
    }

    @Test
    void branchIsRolledBackAtItsTimeoutWithoutACall() throws Exception {
        resource.setTransactionTimeout(1);
        Xid xid = shop.work();
        shop.awaitWaiting(BEFORE);
        assertThrows(JMSException.class, () -> shop.bills.send(shop.session.createTextMessage("late")));
        resource.end(xid, XAResource.TMSUCCESS);
        assertCode(XAException.XA_RBTIMEOUT, () -> resource.start(xid, XAResource.TMJOIN));
        assertCode(XAException.XA_RBTIMEOUT, () -> resource.prepare(xid));
        resource.setTransactionTimeout(0);
        resource.commit(shop.worked(), true);
        assertEquals(AFTER, shop.waiting());
    }

    @Test
    void callsInTheWrongOrderAreRefused() throws Exception {
        Xid xid = Branch.create();
        Xid other = Branch.create();
        assertThrows(jakarta.jms.IllegalStateException.class, shop::deliver);
        assertCode(XAException.XAER_NOTA, () -> resource.end(xid, XAResource.TMSUCCESS));
        assertCode(XAException.XAER_NOTA, () -> resource.prepare(xid));
        assertCode(XAException.XAER_NOTA, () -> resource.start(xid, XAResource.TMJOIN));
        assertCode(XAException.XAER_INVAL, () -> resource.start(xid, XAResource.TMSUCCESS));
        resource.start(xid, XAResource.TMNOFLAGS);
        assertCode(XAException.XAER_DUPID, () -> resource.start(xid, XAResource.TMNOFLAGS));
        assertCode(XAException.XAER_PROTO, () -> resource.start(other, XAResource.TMNOFLAGS));
        assertCode(XAException.XAER_PROTO, () -> resource.prepare(xid));
        assertCode(XAException.XAER_PROTO, () -> resource.start(xid, XAResource.TMRESUME));
        resource.end(xid, XAResource.TMSUCCESS);
        assertCode(XAException.XAER_PROTO, () -> resource.end(xid, XAResource.TMSUCCESS));
        assertCode(XAException.XAER_PROTO, () -> resource.commit(xid, false));
        resource.rollback(xid);
        assertCode(XAException.XAER_NOTA, () -> resource.commit(other, false));
        assertCode(XAException.XAER_NOTA, () -> resource.rollback(Branch.create()));
        assertCode(XAException.XAER_NOTA, () -> resource.forget(other));
    }

    @Test
    void scanOfRecoveryReturnsEachBranchOnce() throws Exception {
        Xid xid = shop.worked();
        resource.prepare(xid);
        assertTrue(Arrays.asList(resource.recover(XAResource.TMSTARTRSCAN)).contains(BranchId.of(xid)));
        assertEquals(0, resource.recover(XAResource.TMNOFLAGS).length);
        assertEquals(0, resource.recover(XAResource.TMENDRSCAN).length);
        assertCode(XAException.XAER_INVAL, () -> resource.recover(XAResource.TMNOFLAGS));
        assertCode(XAException.XAER_INVAL, () -> resource.recover(XAResource.TMJOIN));
        resource.rollback(xid);
    }

    @Test
    void branchThatIsPreparedOrHasAnotherSessionIsNotStartedAgain() throws Exception {
        Xid xid = shop.work();
        XAResource second = shop.connection.createXASession().getXAResource();
        assertCode(XAException.XAER_DUPID, () -> second.start(xid, XAResource.TMNOFLAGS));
        assertCode(XAException.XAER_PROTO, () -> second.commit(xid, false));
        resource.end(xid, XAResource.TMSUCCESS);
        assertEquals(XAResource.XA_OK, resource.prepare(xid));
        assertCode(XAException.XAER_DUPID, () -> resource.start(xid, XAResource.TMNOFLAGS));
        assertCode(XAException.XAER_PROTO, () -> resource.start(xid, XAResource.TMJOIN));
        assertCode(XAException.XAER_PROTO, () -> resource.end(xid, XAResource.TMSUCCESS));
        assertCode(XAException.XAER_PROTO, () -> resource.prepare(xid));
        assertCode(XAException.XAER_PROTO, () -> second.commit(xid, true));
        second.rollback(xid);
        assertEquals(BEFORE, shop.waiting());
        resource.start(xid, XAResource.TMNOFLAGS);
        resource.rollback(xid);
    }

    @Test
    void recoveredBranchIsNotStartedAgain() throws Exception {
        Xid xid = shop.worked();
        resource.prepare(xid);
        try (Shop other = new Shop()) {
            assertTrue(isListed(other.resource, xid));
            assertCode(XAException.XAER_DUPID, () -> other.resource.start(xid, XAResource.TMNOFLAGS));
            other.resource.rollback(xid);
        }
    }

    @Test
    void callsWithoutAValidXidAreRefused() {
        for (String invalid : new String[] {"prepared 1 -1:67:62", "prepared 1 7::62", "prepared 1 7:" + "67".repeat(65) + ":62"}) {
            Xid xid = BranchId.listed(invalid);
            assertCode(XAException.XAER_INVAL, () -> resource.start(xid, XAResource.TMNOFLAGS));
            assertCode(XAException.XAER_INVAL, () -> resource.rollback(xid));
        }
        assertCode(XAException.XAER_INVAL, () -> resource.start(null, XAResource.TMNOFLAGS));
        assertCode(XAException.XAER_INVAL, () -> resource.end(null, XAResource.TMSUCCESS));
        assertCode(XAException.XAER_INVAL, () -> resource.prepare(null));
        assertCode(XAException.XAER_INVAL, () -> resource.commit(null, false));
        assertCode(XAException.XAER_INVAL, () -> resource.forget(null));
    }

    @Test
    void branchThatEndsWhileAnotherThreadIsInACallIsRolledBack() throws Exception {
        Xid xid = shop.work();
        Thread receiver = new Thread(() -> {
            try {
                shop.orders.receive();
            } catch (JMSException closed) {
                return; // by the rollback
            }
        });
        receiver.start();
        while (receiver.getState() != Thread.State.WAITING && receiver.getState() != Thread.State.TIMED_WAITING) {
            Thread.onSpinWait();
        }
        assertCode(XAException.XA_RBPROTO, () -> resource.end(xid, XAResource.TMSUCCESS));
        assertCode(XAException.XA_RBROLLBACK, () -> resource.prepare(xid));
        receiver.join();
        assertEquals(BEFORE, shop.waiting());
    }

    @Test
    void preparedBranchOutlivesItsConnectionAndIsEndedByAnother() throws Exception {
        Xid xid = shop.worked();
        resource.prepare(xid);
        shop.connection.close();
        try (Shop other = new Shop()) {
            assertTrue(isListed(other.resource, xid));
            other.resource.commit(xid, false);
            other.resource.commit(xid, false); // repeated: the first answer may have been lost
            assertCode(XAException.XA_HEURCOM, () -> other.resource.rollback(xid));
        }
        assertEquals(AFTER, shop.waiting());
    }

    @Test
    void branchThatIsNotPreparedEndsWithItsConnection() throws Exception {
        shop.worked();
        shop.connection.close();
        assertEquals(BEFORE, shop.waiting());
    }

    @Test
    void secondBranchOfAnXidIsRolledBack() throws Exception {
        Xid xid = shop.worked();
        resource.prepare(xid);
        try (Shop other = new Shop()) {
            other.resource.start(xid, XAResource.TMNOFLAGS);
            other.deliver();
            other.resource.end(xid, XAResource.TMSUCCESS);
            XAException refusal = assertThrows(XAException.class, () -> other.resource.prepare(xid));
            assertTrue(refusal.getMessage().contains("already prepared"), refusal.getMessage());
            assertEquals(XAException.XA_RBPROTO, refusal.errorCode);
            assertEquals(BEFORE, other.waiting());
            other.resource.start(xid, XAResource.TMNOFLAGS);
            other.deliver();
            other.resource.end(xid, XAResource.TMSUCCESS);
            assertCode(XAException.XA_RBPROTO, () -> other.resource.commit(xid, true));
            assertEquals(BEFORE, other.waiting());
            other.resource.rollback(xid);
        }
    }

    @Test
    void applicationCannotEndTheTransactionOfTheManager() throws Exception {
        assertTrue(shop.session.getTransacted());
        assertThrows(TransactionInProgressException.class, shop.session::commit);
        assertThrows(TransactionInProgressException.class, shop.session::rollback);
        assertThrows(JMSException.class, () -> shop.orders.setMessageListener(message -> {}));
        assertTrue(resource.isSameRM(resource));
        try (Shop other = new Shop()) {
            assertFalse(resource.isSameRM(other.resource));
        }
        Session local = shop.connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        assertFalse(local.getTransacted());
    }
}
