package bascule.xa;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import jakarta.jms.JMSException;
import jakarta.jms.MessageProducer;
import jakarta.jms.XASession;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** Two sessions of a connection in one branch, with a real broker. */
class JoinTest extends BranchTestBase {
    private static final List<String> JOINED = List.of("bill of order", "joined");

    private XASession second;
    private MessageProducer bills;
    private XAResource joining;

    @BeforeEach
    void join() throws JMSException {
        second = shop.connection.createXASession();
        joining = second.getXAResource();
        bills = second.createProducer(shop.bills.getDestination());
    }

    /** Works in a branch with both sessions. */
    private Xid joined() throws Exception {
        Xid xid = shop.work();
        joining.start(xid, XAResource.TMJOIN);
        bills.send(second.createTextMessage("joined"));
        return xid;
    }

    private Xid ended() throws Exception {
        Xid xid = joined();
        joining.end(xid, XAResource.TMSUCCESS);
        resource.end(xid, XAResource.TMSUCCESS);
        return xid;
    }

    @Test
    void branchOfTwoSessionsIsPreparedAndCommittedByOneOfThem() throws Exception {
        assertTrue(resource.isSameRM(joining));
        Xid xid = ended();
        assertEquals(XAResource.XA_OK, resource.prepare(xid));
        assertEquals(List.of(), shop.waiting());
        resource.commit(xid, false);
        assertEquals(JOINED, shop.waiting());
        Xid next = Branch.create();
        joining.start(next, XAResource.TMNOFLAGS);
        bills.send(second.createTextMessage("next"));
        joining.end(next, XAResource.TMSUCCESS);
        joining.commit(next, true);
        assertEquals(3, shop.waiting().size());
    }

    @Test
    void resourceThatHasJoinedEndsTheWholeBranch() throws Exception {
        joining.rollback(ended());
        assertEquals(BEFORE, shop.waiting());
        Xid prepared = ended();
        assertEquals(XAResource.XA_OK, joining.prepare(prepared));
        joining.rollback(prepared);
        assertEquals(BEFORE, shop.waiting());
        joining.commit(ended(), true);
        assertEquals(JOINED, shop.waiting());
    }

    @Test
    void anyResourceEndsABranchThatIsNotPrepared() throws Exception {
        joining.rollback(shop.worked());
        assertEquals(BEFORE, shop.waiting());
        Xid xid = shop.work();
        assertCode(XAException.XAER_PROTO, () -> joining.prepare(xid));
        joining.end(xid, XAResource.TMSUCCESS);
        assertCode(XAException.XAER_PROTO, () -> joining.end(xid, XAResource.TMSUCCESS));
        assertEquals(XAResource.XA_OK, joining.prepare(xid));
        assertCode(XAException.XAER_PROTO, () -> joining.end(xid, XAResource.TMSUCCESS));
        joining.rollback(xid);
        assertEquals(BEFORE, shop.waiting());
        joining.rollback(joined());
        assertEquals(BEFORE, shop.waiting());
        joining.commit(shop.worked(), true);
        assertEquals(List.of("bill of order"), shop.waiting());
    }

    @Test
    void twoResourcesThatEndEachOthersBranchesDoNotWaitForEachOther() throws Exception {
        for (int i = 0; i < 50; i++) {
            Xid first = Branch.create();
            Xid other = Branch.create();
            resource.start(first, XAResource.TMNOFLAGS);
            resource.end(first, XAResource.TMSUCCESS);
            joining.start(other, XAResource.TMNOFLAGS);
            joining.end(other, XAResource.TMSUCCESS);
            CompletableFuture<Void> beside = CompletableFuture.runAsync(() -> {
                try {
                    resource.rollback(other);
                } catch (XAException failure) {
                    throw new IllegalStateException(failure);
                }
            });
            joining.rollback(first);
            beside.get();
        }
    }

    @Test
    void branchEndsOnlyAfterTheWorkOfBothSessionsHasEnded() throws Exception {
        Xid xid = joined();
        resource.end(xid, XAResource.TMSUCCESS);
        assertCode(XAException.XAER_PROTO, () -> resource.prepare(xid));
        joining.end(xid, XAResource.TMSUSPEND);
        assertCode(XAException.XAER_PROTO, () -> resource.commit(xid, true));
        joining.start(xid, XAResource.TMRESUME);
        joining.end(xid, XAResource.TMFAIL);
        assertCode(XAException.XA_RBROLLBACK, () -> resource.prepare(xid));
        assertEquals(BEFORE, shop.waiting());
    }

    @Test
    void branchIsRolledBackIfASessionThatHasJoinedIsClosed() throws Exception {
        Xid xid = ended();
        second.close();
        assertCode(XAException.XA_RBCOMMFAIL, () -> resource.prepare(xid));
        assertEquals(BEFORE, shop.waiting());
    }

    @Test
    void sessionOfAnotherConnectionDoesNotJoin() throws Exception {
        BasculeXAConnectionFactory factory = new BasculeXAConnectionFactory(Shop.brokerUrl());
        try (jakarta.jms.XAConnection one = factory.createXAConnection(); jakarta.jms.XAConnection other = factory.createXAConnection()) {
            XAResource first = one.createXASession().getXAResource();
            XAResource foreign = other.createXASession().getXAResource();
            assertFalse(first.isSameRM(foreign));
            Xid xid = Branch.create();
            first.start(xid, XAResource.TMNOFLAGS);
            assertCode(XAException.XAER_PROTO, () -> foreign.start(xid, XAResource.TMJOIN));
            Xid own = Branch.create();
            foreign.start(own, XAResource.TMNOFLAGS);
            foreign.end(own, XAResource.TMSUCCESS);
            assertEquals(XAResource.XA_RDONLY, foreign.prepare(own));
        }
        assertCode(XAException.XAER_NOTA, () -> joining.start(Branch.create(), XAResource.TMJOIN));
    }
}
