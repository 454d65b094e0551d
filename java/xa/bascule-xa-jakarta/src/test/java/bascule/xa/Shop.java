package bascule.xa;

import jakarta.jms.Connection;
import jakarta.jms.JMSException;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.Queue;
import jakarta.jms.Session;
import jakarta.jms.TextMessage;
import jakarta.jms.XAConnection;
import jakarta.jms.XASession;
import java.util.ArrayList;
import java.util.Enumeration;
import java.util.List;
import java.util.UUID;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.apache.qpid.jms.policy.JmsDefaultPrefetchPolicy;

/** A broker with one order, and a session whose branches receive an order and send a bill. */
final class Shop implements AutoCloseable {
    private static final long RECEIVE_MS = 60_000;

    final XAConnection connection;
    final XASession session;
    final XAResource resource;
    final MessageConsumer orders;
    final MessageProducer bills;
    private final Connection observer;
    private final Session looking;
    private final Queue orderQueue;
    private final Queue billQueue;

    Shop() throws JMSException {
        this(brokerUrl());
    }

    Shop(String url) throws JMSException {
        JmsConnectionFactory factory = new JmsConnectionFactory(url);
        ((JmsDefaultPrefetchPolicy) factory.getPrefetchPolicy()).setAll(0); // a message that is not received is visible in its queue
        connection = new BasculeXAConnectionFactory(factory).createXAConnection();
        session = connection.createXASession();
        resource = session.getXAResource();
        String name = UUID.randomUUID().toString();
        orderQueue = session.createQueue("orders-" + name);
        billQueue = session.createQueue("bills-" + name);
        observer = new JmsConnectionFactory(brokerUrl()).createConnection();
        observer.start();
        looking = observer.createSession(false, Session.AUTO_ACKNOWLEDGE);
        looking.createProducer(orderQueue).send(looking.createTextMessage("order"));
        orders = session.createConsumer(orderQueue);
        bills = session.createProducer(billQueue);
        connection.start();
    }

    static String brokerUrl() {
        String url = System.getProperty("bascule.url", "");
        if (url.isEmpty()) {
            throw new IllegalStateException("set the system property bascule.url to the URL of a broker");
        }
        return url;
    }

    /** Starts a branch, receives the order and sends its bill. */
    Xid work() throws JMSException, XAException {
        Xid xid = Branch.create();
        resource.start(xid, XAResource.TMNOFLAGS);
        deliver();
        return xid;
    }

    /** Does {@link #work}, and ends it. */
    Xid worked() throws JMSException, XAException {
        Xid xid = work();
        resource.end(xid, XAResource.TMSUCCESS);
        return xid;
    }

    void deliver() throws JMSException {
        TextMessage order = (TextMessage) orders.receive(RECEIVE_MS);
        bills.send(session.createTextMessage("bill of " + order.getText()));
    }

    /** Returns the messages that consumers can receive now: orders, then bills. */
    List<String> waiting() throws JMSException {
        List<String> found = new ArrayList<>();
        for (Queue queue : List.of(orderQueue, billQueue)) {
            Enumeration<?> messages = looking.createBrowser(queue).getEnumeration();
            while (messages.hasMoreElements()) {
                found.add(((TextMessage) messages.nextElement()).getText());
            }
        }
        return found;
    }

    /** Waits until consumers can receive exactly these messages; the timeout of the test limits the wait. */
    void awaitWaiting(List<String> wanted) throws JMSException {
        while (!waiting().equals(wanted)) {
            Thread.onSpinWait();
        }
    }

    @Override
    public void close() throws JMSException {
        connection.close();
        observer.close();
    }
}
