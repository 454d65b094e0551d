import jakarta.jms.TextMessage;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.springframework.context.annotation.AnnotationConfigApplicationContext;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;
import org.springframework.jms.annotation.EnableJms;
import org.springframework.jms.annotation.JmsListener;
import org.springframework.jms.config.DefaultJmsListenerContainerFactory;
import org.springframework.jms.connection.CachingConnectionFactory;
import org.springframework.jms.core.JmsTemplate;
import org.springframework.messaging.handler.annotation.Header;
import org.springframework.messaging.handler.annotation.SendTo;

/**
 * JmsTemplate and listener containers of Spring against Bascule, set up as Spring's reference guide does for any JMS provider.
 *
 * <pre>java -cp "$(python -m bascule.embedded.jars path qpid-jms spring)" examples/spring/Shop.java 'failover:(amqp://127.0.0.1:5672)'</pre>
 */
@Configuration
@EnableJms
public class Shop {
    static String url = "failover:(amqp://127.0.0.1:5672)";

    @Bean
    JmsConnectionFactory provider() {
        return new JmsConnectionFactory(url);
    }

    /** A template opens connection, session and producer for each message; this keeps them open. */
    @Bean
    CachingConnectionFactory cached(JmsConnectionFactory provider) {
        return new CachingConnectionFactory(provider);
    }

    @Bean
    JmsTemplate queues(CachingConnectionFactory cached) {
        JmsTemplate template = new JmsTemplate(cached);
        template.setReceiveTimeout(10_000);
        return template;
    }

    @Bean
    JmsTemplate topics(CachingConnectionFactory cached) {
        JmsTemplate template = new JmsTemplate(cached);
        template.setPubSubDomain(true);
        return template;
    }

    /** Two to four workers; message and answer are one transaction, which an exception rolls back. */
    @Bean
    DefaultJmsListenerContainerFactory jmsListenerContainerFactory(JmsConnectionFactory provider) {
        DefaultJmsListenerContainerFactory factory = new DefaultJmsListenerContainerFactory();
        factory.setConnectionFactory(provider);
        factory.setSessionTransacted(true);
        factory.setConcurrency("2-4");
        return factory;
    }

    /** One durable subscriber of a topic. */
    @Bean
    DefaultJmsListenerContainerFactory subscriberFactory(JmsConnectionFactory provider) {
        DefaultJmsListenerContainerFactory factory = new DefaultJmsListenerContainerFactory();
        factory.setConnectionFactory(provider);
        factory.setClientId("warehouse");
        factory.setSubscriptionDurable(true);
        factory.setSessionTransacted(true);
        return factory;
    }

    final Set<String> failed = ConcurrentHashMap.newKeySet();
    final CountDownLatch levels = new CountDownLatch(1);

    @JmsListener(destination = "orders")
    @SendTo("confirmations")
    String confirm(String order, @Header("JMSXDeliveryCount") int delivery) {
        if (order.equals("4712") && failed.add(order)) throw new IllegalArgumentException("the first attempt fails");
        return order + " confirmed, delivery " + delivery;
    }

    /** What it returns goes to the JMSReplyTo of the question. */
    @JmsListener(destination = "prices", selector = "currency = 'EUR'")
    String price(String article) {
        return article + " costs 12.50";
    }

    @JmsListener(destination = "stock", containerFactory = "subscriberFactory", subscription = "levels")
    void stock(String level) {
        System.out.println("warehouse: " + level);
        levels.countDown();
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments.length > 0) url = arguments[0];
        try (AnnotationConfigApplicationContext context = new AnnotationConfigApplicationContext(Shop.class)) {
            JmsTemplate queues = context.getBean("queues", JmsTemplate.class);
            List<String> orders = List.of("4711", "4712", "4713");
            for (String order : orders) queues.convertAndSend("orders", order);
            for (String order : orders) System.out.println(queues.receiveAndConvert("confirmations"));

            var answer = queues.sendAndReceive("prices", session -> {
                var question = session.createTextMessage("chair");
                question.setStringProperty("currency", "EUR");
                return question;
            });
            System.out.println(((TextMessage) answer).getText());

            JmsTemplate topics = context.getBean("topics", JmsTemplate.class);
            Shop shop = context.getBean(Shop.class);
            do topics.convertAndSend("stock", "3 chairs left"); // a subscriber gets what is sent after it has subscribed
            while (!shop.levels.await(1, TimeUnit.SECONDS));
        }
    }
}
