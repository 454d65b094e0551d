package bascule.xa;

import jakarta.jms.JMSException;
import org.apache.qpid.jms.JmsConnection;

/**
 * Starts and stops a connection as the application wishes, and starts it for requests in between.
 *
 * <p>Without a started connection no answer to a request is delivered, and the application may start its connection later.
 */
final class ConnectionStart {
    private final JmsConnection connection;
    private boolean wanted;
    private int requests;

    ConnectionStart(JmsConnection connection) {
        this.connection = connection;
    }

    /** Starts the connection for the application. */
    synchronized void start() throws JMSException {
        connection.start();
        wanted = true;
    }

    /** Stops the connection for the application, after the requests that wait for an answer. */
    synchronized void stop() throws JMSException {
        wanted = false;
        if (requests == 0) {
            connection.stop();
        }
    }

    /** Starts the connection until {@link #endRequest}. */
    synchronized void beginRequest() throws JMSException {
        if (requests == 0 && connection.isStarted()) {
            wanted = true; // a context that shares the connection has started it
        }
        connection.start();
        requests++;
    }

    synchronized void endRequest() throws JMSException {
        requests--;
        if (requests == 0 && !wanted) {
            connection.stop();
        }
    }
}
