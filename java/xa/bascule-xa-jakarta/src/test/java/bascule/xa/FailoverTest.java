package bascule.xa;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.List;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

/** Connections that are lost in each state of a branch. */
class FailoverTest extends BranchTestBase {
    private Relay relay;

    @Override
    Shop createShop() throws Exception {
        relay = new Relay(Shop.brokerUrl());
        return new Shop(relay.failoverUrl());
    }

    @Override
    @AfterEach
    void closeShop() throws Exception {
        super.closeShop();
        relay.close();
    }

    /** The session remains usable: the next branch does the work. */
    private void assertNextBranchWorks() throws Exception {
        Xid xid = shop.worked();
        assertEquals(XAResource.XA_OK, resource.prepare(xid));
        resource.commit(xid, false);
        assertEquals(AFTER, shop.waiting());
    }

    @Test
    void branchThatLostItsConnectionAtWorkVotesRollback() throws Exception {
        Xid xid = shop.work();
        relay.cut();
        bill("sent after the loss");
        resource.end(xid, XAResource.TMSUCCESS);
        assertCode(XAException.XA_RBCOMMFAIL, () -> resource.prepare(xid));
        assertEquals(BEFORE, shop.waiting());
        assertNextBranchWorks();
    }

    @Test
    void branchThatLostItsConnectionBeforePrepareIsNotCommittedInPart() throws Exception {
        for (boolean onePhase : new boolean[] {false, true}) {
            Xid xid = shop.worked();
            relay.cut();
            assertCode(XAException.XA_RBCOMMFAIL, () -> vote(xid, onePhase));
            assertEquals(BEFORE, shop.waiting());
        }
        assertNextBranchWorks();
    }

    @Test
    void preparedBranchIsCommittedAfterTheConnectionWasLost() throws Exception {
        Xid xid = shop.worked();
        assertEquals(XAResource.XA_OK, resource.prepare(xid));
        relay.cut();
        resource.commit(xid, false);
        assertEquals(AFTER, shop.waiting());
    }

    @Test
    void lostAnswersOfPrepareAndCommitAreAskedForAgain() throws Exception {
        Xid xid = shop.worked();
        cutAfterNextRequest();
        assertEquals(XAResource.XA_OK, resource.prepare(xid));
        cutAfterNextRequest();
        resource.commit(xid, false);
        assertEquals(AFTER, shop.waiting());
    }

    @Test
    void lostAnswerOfOnePhaseCommitIsSettled() throws Exception {
        warmUp();
        Xid xid = shop.worked();
        cutAfterNextRequest();
        List<String> expected = AFTER;
        try {
            resource.commit(xid, true);
        } catch (XAException failure) {
            assertEquals(XAException.XA_RBCOMMFAIL, failure.errorCode);
            expected = BEFORE;
        }
        assertEquals(expected, shop.waiting());
    }

    /** Ends a branch as a commit would, and checks that it is rolled back. */
    private void assertRolledBack(Xid xid, boolean onePhase) {
        XAException failure = assertThrows(XAException.class, () -> vote(xid, onePhase));
        assertTrue(failure.errorCode >= XAException.XA_RBBASE && failure.errorCode <= XAException.XA_RBEND, "code " + failure.errorCode);
    }

    @Test
    void suspendedBranchThatLostItsConnectionIsRolledBack() throws Exception {
        for (boolean onePhase : new boolean[] {false, true}) {
            Xid xid = suspended();
            relay.cut();
            resource.end(xid, XAResource.TMSUCCESS);
            assertRolledBack(xid, onePhase);
            assertEquals(BEFORE, shop.waiting());
        }
        assertNextBranchWorks();
    }

    @Test
    void branchThatWasLeftAndItsSuccessorAreRolledBackWithTheirConnection() throws Exception {
        for (boolean onePhase : new boolean[] {false, true}) {
            Xid outer = suspended();
            Xid inner = billed("inner");
            relay.cut();
            resource.end(inner, XAResource.TMSUCCESS);
            resource.end(outer, XAResource.TMSUCCESS);
            assertRolledBack(outer, onePhase);
            assertRolledBack(inner, onePhase);
            assertEquals(BEFORE, shop.waiting());
        }
        assertNextBranchWorks();
    }

    @Test
    void resumedBranchWhoseFirstPartWasLostIsRolledBackAsAWhole() throws Exception {
        for (boolean onePhase : new boolean[] {false, true}) {
            Xid outer = suspended();
            Xid inner = ended("inner");
            resource.rollback(inner);
            relay.cut();
            resource.start(outer, XAResource.TMRESUME);
            bill("after the loss");
            resource.end(outer, XAResource.TMSUCCESS);
            assertRolledBack(outer, onePhase);
            assertEquals(BEFORE, shop.waiting());
        }
        assertNextBranchWorks();
    }

    @Test
    void branchIsRolledBackIfTheAnswerToItsSuspensionIsLost() throws Exception {
        Xid outer = suspended();
        cutAfterNextRequest();
        Xid inner = billed("inner");
        resource.end(outer, XAResource.TMSUCCESS);
        assertRolledBack(outer, false);
        resource.end(inner, XAResource.TMSUCCESS);
        assertEquals(XAResource.XA_OK, resource.prepare(inner));
        resource.commit(inner, false);
        assertEquals(List.of("order", "inner"), shop.waiting());
    }

    @Test
    void lostAnswerToTheRollbackOfABranchThatWasLeftIsNoError() throws Exception {
        Xid outer = suspended();
        Xid inner = billed("inner");
        cutAfterNextRequest();
        resource.rollback(outer);
        assertEquals(BEFORE, shop.waiting());
        assertCode(XAException.XAER_NOTA, () -> resource.start(outer, XAResource.TMRESUME));
        resource.end(inner, XAResource.TMSUCCESS);
        assertRolledBack(inner, false);
        assertNextBranchWorks();
    }

    @Test
    void lostAnswerToTheRollbackOfAPreparedBranchIsAskedForAgain() throws Exception {
        Xid xid = shop.worked();
        assertEquals(XAResource.XA_OK, resource.prepare(xid));
        cutAfterNextRequest();
        resource.rollback(xid);
        assertEquals(BEFORE, shop.waiting());
        assertCode(XAException.XA_HEURRB, () -> resource.commit(xid, false));
        assertNextBranchWorks();
    }

    @Test
    void lostAnswerToTheRollbackOfABranchThatIsNotPreparedIsNoError() throws Exception {
        Xid xid = shop.worked();
        relay.cutInsteadOfAnswer();
        resource.rollback(xid);
        shop.awaitWaiting(BEFORE);
        assertNextBranchWorks();
    }

    /** Creates the links for requests, so that the next request is one message. */
    private void warmUp() throws XAException {
        resource.recover(XAResource.TMSTARTRSCAN | XAResource.TMENDRSCAN);
    }

    /** Cuts the connection after the broker has got the next request, so that its answer is lost. */
    private void cutAfterNextRequest() throws XAException {
        warmUp();
        relay.cutInsteadOfAnswer();
    }
}
