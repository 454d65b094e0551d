package bascule.xa;

import jakarta.jms.JMSException;
import org.apache.qpid.jms.JmsConnection;

/** Opens connections with one set of options and credentials. */
interface Connector {
    JmsConnection connect() throws JMSException;
}
