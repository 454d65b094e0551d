package bascule.xa;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import java.util.List;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** Connections that are lost in each state of a branch. */
@Tag("broker")
@Timeout(240)
class FailoverTest {
    private static final List<String> BEFORE = List.of("order");
    private static final List<String> AFTER = List.of("bill of order");

    private Relay relay;
    private Shop shop;
    private XAResource resource;

    @BeforeEach
    void open() throws Exception {
        relay = new Relay(Shop.brokerUrl());
        shop = new Shop(relay.failoverUrl());
        resource = shop.resource;
    }

    @AfterEach
    void close() throws Exception {
        shop.close();
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
        shop.bills.send(shop.session.createTextMessage("sent after the loss"));
        resource.end(xid, XAResource.TMSUCCESS);
        assertEquals(XAException.XA_RBCOMMFAIL, assertThrows(XAException.class, () -> resource.prepare(xid)).errorCode);
        assertEquals(BEFORE, shop.waiting());
        assertNextBranchWorks();
    }

    @Test
    void branchThatLostItsConnectionBeforePrepareIsNotCommittedInPart() throws Exception {
        for (boolean onePhase : new boolean[] {false, true}) {
            Xid xid = shop.worked();
            relay.cut();
            XAException failure = assertThrows(XAException.class, () -> {
                if (onePhase) {
                    resource.commit(xid, true);
                } else {
                    resource.prepare(xid);
                }
            });
            assertEquals(XAException.XA_RBCOMMFAIL, failure.errorCode);
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
