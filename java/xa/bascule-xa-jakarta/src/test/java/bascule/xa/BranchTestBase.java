package bascule.xa;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import jakarta.jms.JMSException;
import java.util.List;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.function.Executable;

/** The frame of a test with a real broker: a session that receives orders and sends bills in branches. */
@Tag("broker")
@Timeout(240)
abstract class BranchTestBase {
    /** The waiting messages before and after {@link Shop#work}. */
    static final List<String> BEFORE = List.of("order");
    static final List<String> AFTER = List.of("bill of order");

    Shop shop;
    XAResource resource;

    @BeforeEach
    void openShop() throws Exception {
        shop = createShop();
        resource = shop.resource;
    }

    @AfterEach
    void closeShop() throws Exception {
        shop.close();
    }

    /** Returns a new shop, whose connection a test may choose. */
    Shop createShop() throws Exception {
        return new Shop();
    }

    static void assertCode(int code, Executable call) {
        assertEquals(code, assertThrows(XAException.class, call).errorCode);
    }

    void bill(String text) throws JMSException {
        shop.bills.send(shop.session.createTextMessage(text));
    }

    /** Returns a branch that has sent a bill and has not ended. */
    Xid billed(String text) throws Exception {
        Xid xid = Branch.create();
        resource.start(xid, XAResource.TMNOFLAGS);
        bill(text);
        return xid;
    }

    /** Returns a branch that has sent a bill, and whose work has ended. */
    Xid ended(String text) throws Exception {
        Xid xid = billed(text);
        resource.end(xid, XAResource.TMSUCCESS);
        return xid;
    }

    /** Commits in one phase, or prepares. */
    void vote(Xid xid, boolean onePhase) throws XAException {
        if (onePhase) {
            resource.commit(xid, true);
        } else {
            resource.prepare(xid);
        }
    }

    /** Returns a suspended branch, which has received the order and sent its bill. */
    Xid suspended() throws Exception {
        Xid xid = shop.work();
        resource.end(xid, XAResource.TMSUSPEND);
        return xid;
    }
}
