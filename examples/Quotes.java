import jakarta.jms.*;
import org.apache.qpid.jms.JmsConnectionFactory;

/**
 * Request and reply in plain JMS. The program does not know that a Kafka application is at the other end.
 *
 * <pre>
 * java -cp "$(python -m bascule.embedded.jars path qpid-jms)" examples/Quotes.java ask quotes 'AAPL'
 * java -cp "$(python -m bascule.embedded.jars path qpid-jms)" examples/Quotes.java answer rates 3
 * </pre>
 */
public final class Quotes {
    public static void main(String[] arguments) throws JMSException {
        String url = arguments.length > 3 ? arguments[3] : "failover:(amqp://127.0.0.1:5672)";
        try (Connection connection = new JmsConnectionFactory(url).createConnection()) {
            connection.start();
            Session session = connection.createSession(Session.AUTO_ACKNOWLEDGE);
            Queue queue = session.createQueue(arguments[1]);
            if (arguments[0].equals("ask")) {
                ask(session, queue, arguments[2]);
            } else {
                answer(session, queue, Integer.parseInt(arguments[2]));
            }
        }
    }

    private static void ask(Session session, Queue queue, String text) throws JMSException {
        TemporaryQueue answers = session.createTemporaryQueue();
        MessageConsumer consumer = session.createConsumer(answers);
        TextMessage question = session.createTextMessage(text);
        question.setJMSReplyTo(answers);
        session.createProducer(queue).send(question);
        TextMessage answer = (TextMessage) consumer.receive(180_000);
        boolean fits = answer != null && question.getJMSMessageID().equals(answer.getJMSCorrelationID());
        System.out.println(fits ? answer.getText() : "no answer: " + answer);
    }

    private static void answer(Session session, Queue queue, int count) throws JMSException {
        MessageConsumer consumer = session.createConsumer(queue);
        MessageProducer producer = session.createProducer(null);
        for (int number = 0; number < count; number++) {
            TextMessage question = (TextMessage) consumer.receive();
            TextMessage answer = session.createTextMessage(question.getText() + " is 1.08");
            String correlation = question.getJMSCorrelationID();
            answer.setJMSCorrelationID(correlation != null ? correlation : question.getJMSMessageID());
            if (question.getJMSReplyTo() != null) {
                producer.send(question.getJMSReplyTo(), answer);
            }
        }
    }
}
