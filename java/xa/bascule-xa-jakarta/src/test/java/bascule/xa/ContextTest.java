package bascule.xa;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import jakarta.jms.IllegalStateRuntimeException;
import jakarta.jms.JMSConsumer;
import jakarta.jms.JMSContext;
import jakarta.jms.JMSRuntimeException;
import jakarta.jms.Queue;
import jakarta.jms.TransactionInProgressRuntimeException;
import jakarta.jms.XAJMSContext;
import java.util.UUID;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;
import org.apache.qpid.jms.JmsConnection;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** The simplified API, and when a connection is started, with a real broker. */
@Tag("broker")
@Timeout(240)
class ContextTest {
    private static final long RECEIVE_MS = 60_000;

    private static XAJMSContext context() {
        return new BasculeXAConnectionFactory(Shop.brokerUrl() + "?jms.prefetchPolicy.all=0").createXAContext();
    }

    private static Xid started(XAResource resource) throws XAException {
        Xid xid = Branch.create();
        resource.start(xid, XAResource.TMNOFLAGS);
        return xid;
    }

    private static void committed(XAResource resource, Xid xid) throws XAException {
        resource.end(xid, XAResource.TMSUCCESS);
        assertEquals(XAResource.XA_OK, resource.prepare(xid));
        resource.commit(xid, false);
    }

    @Test
    void contextSendsAndReceivesWithinItsBranches() throws Exception {
        try (XAJMSContext context = context()) {
            XAResource resource = context.getXAResource();
            Queue queue = context.createQueue(UUID.randomUUID().toString());
            Xid sent = started(resource);
            context.createProducer().setProperty("number", 1).send(queue, "order");
            committed(resource, sent);

            JMSConsumer consumer = context.createConsumer(queue);
            Xid rolledBack = started(resource);
            assertEquals("order", consumer.receiveBody(String.class, RECEIVE_MS));
            resource.end(rolledBack, XAResource.TMSUCCESS);
            resource.rollback(rolledBack);

            Xid received = started(resource);
            assertEquals(1, consumer.receive(RECEIVE_MS).getIntProperty("number"));
            committed(resource, received);
            assertFalse(context.createBrowser(queue).getEnumeration().hasMoreElements());
        }
    }

    @Test
    void contextRefusesWorkOutsideOfBranchesAndTheEndOfItsTransaction() throws Exception {
        try (XAJMSContext context = context()) {
            Queue queue = context.createQueue(UUID.randomUUID().toString());
            JMSConsumer consumer = context.createConsumer(queue);
            assertTrue(context.getTransacted());
            assertEquals(JMSContext.SESSION_TRANSACTED, context.getSessionMode());
            assertSame(context, context.getContext());
            assertThrows(IllegalStateRuntimeException.class, () -> context.createProducer().send(queue, "order"));
            assertThrows(IllegalStateRuntimeException.class, () -> consumer.receiveNoWait());
            assertThrows(IllegalStateRuntimeException.class, () -> consumer.setMessageListener(message -> {}));
            assertThrows(TransactionInProgressRuntimeException.class, context::commit);
            assertThrows(TransactionInProgressRuntimeException.class, context::rollback);
            assertThrows(IllegalStateRuntimeException.class, context::recover);
            try (JMSContext local = context.createContext(JMSContext.AUTO_ACKNOWLEDGE)) {
                local.createProducer().send(queue, "order");
                assertEquals("order", local.createConsumer(queue).receiveBody(String.class, RECEIVE_MS));
            }
            assertNull(local(context, queue));
        }
        assertThrows(JMSRuntimeException.class, () -> new BasculeXAConnectionFactory("amqp://127.0.0.1:1").createXAContext("user", "password"));
    }

    /** Returns what a second context of the connection finds in a queue. */
    private static Object local(XAJMSContext context, Queue queue) {
        try (JMSContext local = context.createContext(JMSContext.AUTO_ACKNOWLEDGE)) {
            return local.createConsumer(queue).receiveNoWait();
        }
    }

    @Test
    void requestLeavesConnectionStartedOrStoppedAsTheApplicationWishes() throws Exception {
        try (JmsConnection connection = (JmsConnection) new JmsConnectionFactory(Shop.brokerUrl()).createConnection()) {
            ConnectionStart start = new ConnectionStart(connection);
            start.beginRequest();
            assertTrue(connection.isStarted());
            start.endRequest();
            assertFalse(connection.isStarted());

            start.beginRequest();
            start.start();
            start.endRequest();
            assertTrue(connection.isStarted());

            start.beginRequest();
            start.stop();
            assertTrue(connection.isStarted()); // the answer to the request still arrives
            start.endRequest();
            assertFalse(connection.isStarted());
        }
    }
}
