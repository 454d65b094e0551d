package bascule.load;

import bascule.xa.BasculeXAConnectionFactory;
import jakarta.jms.JMSException;
import jakarta.jms.XAConnectionFactory;
import org.apache.activemq.artemis.jms.client.ActiveMQXAConnectionFactory;

/** The broker whose client makes the XA connections. Only the jars of the chosen broker need to be present. */
enum Broker {
    /** Apache Artemis with its own client and protocol. */
    ARTEMIS {
        @Override
        XAConnectionFactory factory(String url) {
            return Artemis.factory(url);
        }
    },
    /** Bascule with Qpid JMS and bascule-xa-jakarta. */
    BASCULE {
        @Override
        XAConnectionFactory factory(String url) throws JMSException {
            return Bascule.factory(url);
        }
    };

    abstract XAConnectionFactory factory(String url) throws JMSException;

    private static final class Artemis {
        static XAConnectionFactory factory(String url) {
            return new ActiveMQXAConnectionFactory(url);
        }
    }

    private static final class Bascule {
        static XAConnectionFactory factory(String url) throws JMSException {
            return new BasculeXAConnectionFactory(url + "?jms.prefetchPolicy.all=0");
        }
    }
}
