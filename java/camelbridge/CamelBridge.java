import java.util.concurrent.CountDownLatch;
import org.apache.activemq.artemis.jms.client.ActiveMQConnectionFactory;
import org.apache.camel.CamelContext;
import org.apache.camel.Exchange;
import org.apache.camel.builder.RouteBuilder;
import org.apache.camel.component.jms.JmsComponent;
import org.apache.camel.component.kafka.KafkaConstants;
import org.apache.camel.component.kafka.consumer.KafkaManualCommit;
import org.apache.camel.impl.DefaultCamelContext;
import org.messaginghub.pooled.jms.JmsPoolConnectionFactory;
import org.springframework.jms.connection.JmsTransactionManager;

/**
 * A bridge between Artemis and Kafka as a careful user of Apache Camel writes it: at least once, and in order.
 *
 * <pre>java -cp JARS CamelBridge tcp://BROKER KAFKA OUT IN</pre>
 *
 * The program carries the queue OUT to the topic OUT, and the topic IN to the queue IN, until it is stopped. bench/README.md gives the reason for
 * each setting.
 */
public final class CamelBridge extends RouteBuilder {
    /** Records that a JMS transaction may have, and the longest wait for more of them, in ms. */
    static final int BATCH_MAX = 500, BATCH_WAIT_MS = 10;

    final String kafka, out, in;

    CamelBridge(String kafka, String out, String in) {
        this.kafka = kafka;
        this.out = out;
        this.in = in;
    }

    public static void main(String[] arguments) throws Exception {
        JmsPoolConnectionFactory connections = new JmsPoolConnectionFactory();
        connections.setConnectionFactory(new ActiveMQConnectionFactory(arguments[0]));
        JmsComponent jms = new JmsComponent();
        jms.setConnectionFactory(connections);
        CamelContext camel = new DefaultCamelContext();
        camel.getRegistry().bind("jms", jms);
        camel.getRegistry().bind("transactions", new JmsTransactionManager(connections));
        camel.addRoutes(new CamelBridge(arguments[1], arguments[2], arguments[3]));
        camel.start();
        System.out.println("ready");
        Runtime.getRuntime().addShutdownHook(new Thread(camel::stop));
        new CountDownLatch(1).await();
    }

    @Override
    public void configure() {
        // A failed send to Kafka rolls the JMS transaction back.
        from("jms:queue:" + out + "?transacted=true&lazyCreateTransactionManager=false&cacheLevelName=CACHE_CONSUMER")
                .to("kafka:" + out + "?brokers=" + kafka + "&requestRequiredAcks=all&enableIdempotence=true");
        // The offsets are committed after the JMS transaction. A static member of the group needs no rebalance after a crash.
        from("kafka:" + in + "?brokers=" + kafka + "&groupId=" + in + "&groupInstanceId=bridge&autoOffsetReset=earliest"
                + "&autoCommitEnable=false&allowManualCommit=true&batching=true&maxPollRecords=" + BATCH_MAX
                + "&pollTimeoutMs=" + BATCH_WAIT_MS + "&batchingIntervalMs=" + BATCH_WAIT_MS)
                .to("direct:transaction")
                .process(exchange -> exchange.getMessage().getHeader(KafkaConstants.MANUAL_COMMIT, KafkaManualCommit.class).commit());
        from("direct:transaction").transacted().split(body()).stopOnException().process(CamelBridge::unwrap).to("jms:queue:" + in);
    }

    /** Replace an exchange of the batch by its body. */
    static void unwrap(Exchange exchange) {
        exchange.getMessage().setBody(exchange.getMessage().getBody(Exchange.class).getMessage().getBody());
    }
}
