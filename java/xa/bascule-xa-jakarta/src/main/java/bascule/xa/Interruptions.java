package bascule.xa;

import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.Session;
import java.net.URI;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.qpid.jms.JmsConnectionListener;
import org.apache.qpid.jms.message.JmsInboundMessageDispatch;

/** Counts the losses of a connection: a request that was waiting gets no answer. */
final class Interruptions implements JmsConnectionListener {
    private final AtomicInteger count = new AtomicInteger();

    int count() {
        return count.get();
    }

    @Override
    public void onConnectionInterrupted(URI remoteUri) {
        count.incrementAndGet();
    }

    @Override
    public void onConnectionFailure(Throwable error) {
        count.incrementAndGet();
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
    public void onProducerClosed(MessageProducer producer, Throwable cause) {}
}
