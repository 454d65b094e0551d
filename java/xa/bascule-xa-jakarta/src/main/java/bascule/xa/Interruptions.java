package bascule.xa;

import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.Session;
import java.net.URI;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.qpid.jms.JmsConnectionListener;
import org.apache.qpid.jms.message.JmsInboundMessageDispatch;

/** Counts how often a connection, or a producer on it, was lost: an answer that was awaited then does not come. */
final class Interruptions implements JmsConnectionListener {
    private final AtomicInteger count = new AtomicInteger();
    private volatile String reason = "the connection was lost";

    int count() {
        return count.get();
    }

    /** Returns the reason of the last interruption. */
    String reason() {
        return reason;
    }

    private void count(String why) {
        reason = why;
        count.incrementAndGet();
    }

    @Override
    public void onConnectionInterrupted(URI remoteUri) {
        count("the connection was lost");
    }

    @Override
    public void onConnectionFailure(Throwable error) {
        count("the connection was lost: " + error.getMessage());
    }

    @Override
    public void onConnectionEstablished(URI remoteUri) {}

    @Override
    public void onConnectionRestored(URI remoteUri) {}

    @Override
    public void onInboundMessage(JmsInboundMessageDispatch envelope) {}

    @Override
    public void onSessionClosed(Session session, Throwable cause) {}

    @Override
    public void onConsumerClosed(MessageConsumer consumer, Throwable cause) {}

    @Override
    public void onProducerClosed(MessageProducer producer, Throwable cause) {
        count("the broker closed a producer" + (cause == null ? "" : ": " + cause.getMessage()));
    }
}
