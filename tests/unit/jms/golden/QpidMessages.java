package org.apache.qpid.jms.provider.amqp.message;

import jakarta.jms.*;
import io.netty.buffer.ByteBuf;
import io.netty.buffer.ByteBufUtil;
import org.apache.qpid.jms.*;
import org.apache.qpid.jms.message.*;
import org.apache.qpid.jms.meta.*;
import org.apache.qpid.jms.provider.amqp.*;

/**
 * Prints messages as Qpid JMS encodes them, one line each: name, space, hexadecimal. The lines are qpid_messages.txt.
 *
 * It stands in the client's package because the encoder is not public:
 *   javac -cp JARS -d OUT QpidMessages.java && java -cp JARS:OUT org.apache.qpid.jms.provider.amqp.message.QpidMessages
 * with qpid-jms-client, proton-j, jakarta.jms-api, netty-buffer, netty-common and slf4j-api as JARS.
 */
public class QpidMessages {
    static final long NOW = 1700000000000L;
    static JmsMessageFactory messages;

    public static void main(String[] arguments) throws Exception {
        var field = sun.misc.Unsafe.class.getDeclaredField("theUnsafe");
        field.setAccessible(true);
        var unsafe = (sun.misc.Unsafe) field.get(null);
        var info = new JmsConnectionInfo(new JmsConnectionId("golden"));
        var provider = (AmqpProvider) unsafe.allocateInstance(AmqpProvider.class);
        var connection = new AmqpConnection(provider, info, null);
        messages = connection.getAmqpMessageFactory();

        var text = messages.createTextMessage("hello");
        text.setStringProperty("carrier", "UA");
        text.setIntProperty("dep_delay", 40);
        text.setLongProperty("distance", 1400L);
        text.setDoubleProperty("price", 99.5);
        text.setFloatProperty("weight", 0.1f);
        text.setShortProperty("gate", (short) 7);
        text.setByteProperty("row", (byte) -3);
        text.setBooleanProperty("late", true);
        send("text", text, new JmsQueue("flights"), DeliveryMode.PERSISTENT, 4, 0, 0);

        var full = messages.createTextMessage("full");
        full.setJMSCorrelationID("order-1");
        full.setJMSReplyTo(new JmsTemporaryQueue("temp-1"));
        full.setJMSType("booking");
        full.setStringProperty("JMSXGroupID", "g1");
        full.setIntProperty("JMSXGroupSeq", 3);
        send("text-all-headers", full, new JmsTopic("news.uk"), DeliveryMode.NON_PERSISTENT, 7, 60000, 5000);

        send("text-null", messages.createTextMessage(null), new JmsQueue("q"), DeliveryMode.NON_PERSISTENT, 4, 0, 0);

        var bytes = messages.createBytesMessage();
        bytes.writeBytes(new byte[] {0, 1, (byte) 0xff});
        bytes.setJMSCorrelationIDAsBytes(new byte[] {(byte) 0xca, (byte) 0xfe});
        send("bytes", bytes, new JmsQueue("q"), DeliveryMode.PERSISTENT, 4, 0, 0);

        var map = messages.createMapMessage();
        map.setString("name", "JFK");
        map.setInt("runways", 4);
        map.setLong("passengers", 62000000000L);
        map.setByte("b", (byte) 1);
        map.setShort("s", (short) 2);
        map.setFloat("f", 1.5f);
        map.setDouble("d", 40.6413);
        map.setBoolean("open", true);
        map.setChar("c", 'x');
        map.setBytes("raw", new byte[] {1, 2});
        map.setObject("none", null);
        send("map", map, new JmsQueue("q"), DeliveryMode.PERSISTENT, 4, 0, 0);

        var stream = messages.createStreamMessage();
        stream.writeInt(1);
        stream.writeString("two");
        stream.writeDouble(3.0);
        stream.writeBytes(new byte[] {4});
        send("stream", stream, new JmsQueue("q"), DeliveryMode.PERSISTENT, 4, 0, 0);

        send("object", messages.createObjectMessage("opaque"), new JmsQueue("q"), DeliveryMode.PERSISTENT, 4, 0, 0);
        send("object-null", messages.createObjectMessage(null), new JmsQueue("q"), DeliveryMode.PERSISTENT, 4, 0, 0);

        var typed = messages.createObjectMessage(null);
        typed.setBooleanProperty("JMS_AMQP_TYPED_ENCODING", true);
        typed.setObject(new java.util.ArrayList<>(java.util.List.of("a", 1, 2L)));
        send("object-typed", typed, new JmsQueue("q"), DeliveryMode.PERSISTENT, 4, 0, 0);

        send("message", messages.createMessage(), new JmsQueue("q"), DeliveryMode.PERSISTENT, 9, 0, 0);

        var uuid = messages.createMessage();
        uuid.setJMSCorrelationID("ID:AMQP_UUID:00000000-0000-0001-0000-000000000002");
        send("correlation-uuid", uuid, new JmsQueue("q"), DeliveryMode.PERSISTENT, 4, 0, 0);
        var ulong = messages.createMessage();
        ulong.setJMSCorrelationID("ID:AMQP_ULONG:18446744073709551615");
        send("correlation-ulong", ulong, new JmsQueue("q"), DeliveryMode.PERSISTENT, 4, 0, 0);

        var large = messages.createTextMessage("x".repeat(300));
        for (int i = 0; i < 40; i++) large.setStringProperty("property_" + i, "value " + i);
        send("text-wide", large, new JmsQueue("q"), DeliveryMode.PERSISTENT, 4, 0, 0);
    }

    /** What JmsSession.send does to a message before it encodes it. */
    static void send(String name, Message message, JmsDestination to, int mode, int priority, long ttl, long delay) throws Exception {
        var outbound = (JmsMessage) message;
        outbound.setJMSDeliveryMode(mode);
        outbound.setJMSPriority(priority);
        outbound.setJMSRedelivered(false);
        outbound.setJMSDestination(to);
        outbound.setJMSTimestamp(NOW);
        outbound.setJMSExpiration(ttl > 0 ? NOW + ttl : 0);
        outbound.getFacade().setDeliveryTime(NOW + delay, delay > 0);
        outbound.getFacade().setProviderMessageIdObject("ID:golden:1:1:1-1");
        outbound.onSend(ttl);
        System.out.println(name + " " + ByteBufUtil.hexDump((ByteBuf) outbound.getFacade().encodeMessage()));
    }
}
