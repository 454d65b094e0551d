import jakarta.jms.*;
import org.apache.qpid.jms.JmsConnectionFactory;

/**
 * A JMS client like any other: sends a message to a queue and receives it, in one transaction each.
 *
 * <pre>java -cp "$(python -m bascule.embedded.jars path qpid-jms)" examples/Hello.java 'failover:(amqp://127.0.0.1:5672)'</pre>
 */
public final class Hello {
    public static void main(String[] arguments) throws JMSException {
        String url = arguments.length > 0 ? arguments[0] : "failover:(amqp://127.0.0.1:5672)";
        try (Connection connection = new JmsConnectionFactory(url).createConnection()) {
            connection.start();
            Session session = connection.createSession(Session.SESSION_TRANSACTED);
            Queue queue = session.createQueue("hello");

            TextMessage message = session.createTextMessage("Hello from Java");
            message.setStringProperty("language", "Java");
            session.createProducer(queue).send(message);
            session.commit(); // returns when the message is in Kafka

            TextMessage received = (TextMessage) session.createConsumer(queue).receive(10_000);
            System.out.println(received.getText() + ", delivery " + received.getIntProperty("JMSXDeliveryCount"));
            session.commit(); // now it is gone from the queue
        }
    }
}
