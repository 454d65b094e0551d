import jakarta.jms.*;
import java.io.Serializable;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Enumeration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.function.BiFunction;

/** JMS messages to and from JSON. */
final class Messages {
    interface Conversion extends BiFunction<Object, Long, Object> {}

    static final Map<String, Conversion> TYPES = Map.ofEntries(
            Map.entry("null", (value, n) -> null),
            Map.entry("boolean", (value, n) -> value),
            Map.entry("byte", (value, n) -> ((Number) value).byteValue()),
            Map.entry("short", (value, n) -> ((Number) value).shortValue()),
            Map.entry("int", (value, n) -> ((Number) value).intValue()),
            Map.entry("long", (value, n) -> ((Number) value).longValue()),
            Map.entry("float", (value, n) -> ((Number) value).floatValue()),
            Map.entry("double", (value, n) -> ((Number) value).doubleValue()),
            Map.entry("char", (value, n) -> value.toString().charAt(0)),
            Map.entry("string", (value, n) -> value.toString().replace("{n}", Long.toString(n))),
            Map.entry("bytes", (value, n) -> Base64.getDecoder().decode(value.toString())),
            Map.entry("n", (value, n) -> n.intValue()));

    static Message create(Tool tool, Session session, Map<String, Object> in, long n) throws JMSException {
        Message message = withBody(session, Tool.string(in, "type", "text"), in.get("body"), n);
        if (in.get("properties") != null) {
            for (Map.Entry<String, Object> property : Json.map(in.get("properties")).entrySet()) {
                message.setObjectProperty(property.getKey(), value(property.getValue(), n));
            }
        }
        if (in.get("correlation_id") != null) message.setJMSCorrelationID(value(in.get("correlation_id"), n).toString());
        if (in.get("jms_type") != null) message.setJMSType(Tool.string(in, "jms_type", null));
        if (in.get("reply_to") != null) message.setJMSReplyTo(tool.destination(session, in.get("reply_to")));
        return message;
    }

    static Message withBody(Session session, String type, Object body, long n) throws JMSException {
        switch (type) {
            case "text":
                return session.createTextMessage(body == null ? null : value(body.toString(), n).toString());
            case "bytes":
                BytesMessage bytes = session.createBytesMessage();
                if (body != null) bytes.writeBytes(Base64.getDecoder().decode(body.toString()));
                return bytes;
            case "map":
                MapMessage map = session.createMapMessage();
                for (Map.Entry<String, Object> entry : Json.map(body).entrySet()) map.setObject(entry.getKey(), value(entry.getValue(), n));
                return map;
            case "stream":
                StreamMessage stream = session.createStreamMessage();
                for (Object each : (List<?>) body) stream.writeObject(value(each, n));
                return stream;
            case "object":
                return session.createObjectMessage((Serializable) value(body, n));
            case "message":
                return session.createMessage();
            default:
                throw new IllegalArgumentException("no message type " + type);
        }
    }

    /** A pair ["short", 3], or a plain value: integers become int where they fit, else long; numbers with a point double. */
    static Object value(Object json, long n) {
        if (json instanceof List<?> pair) return TYPES.get(pair.get(0).toString()).apply(pair.get(1), n);
        if (json instanceof String) return TYPES.get("string").apply(json, n);
        if (json instanceof Long number && number == number.intValue()) return number.intValue();
        return json;
    }

    static Map<String, Object> describe(Tool tool, Message message) throws JMSException {
        long tag = tool.tags.incrementAndGet();
        tool.received.put(tag, message);
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("tag", tag);
        fields.put("message_id", message.getJMSMessageID());
        fields.put("correlation_id", message.getJMSCorrelationID());
        fields.put("destination", tool.name(message.getJMSDestination()));
        fields.put("reply_to", tool.name(message.getJMSReplyTo()));
        fields.put("jms_type", message.getJMSType());
        fields.put("persistent", message.getJMSDeliveryMode() == DeliveryMode.PERSISTENT);
        fields.put("priority", message.getJMSPriority());
        fields.put("timestamp_ms", message.getJMSTimestamp());
        fields.put("expiration_ms", message.getJMSExpiration());
        fields.put("delivery_time_ms", message.getJMSDeliveryTime());
        fields.put("redelivered", message.getJMSRedelivered());
        Map<String, Object> properties = new LinkedHashMap<>();
        for (Enumeration<?> each = message.getPropertyNames(); each.hasMoreElements(); ) {
            String name = (String) each.nextElement();
            properties.put(name, pair(message.getObjectProperty(name)));
        }
        fields.put("properties", properties);
        describeBody(message, fields);
        return fields;
    }

    static void describeBody(Message message, Map<String, Object> fields) throws JMSException {
        if (message instanceof TextMessage text) {
            fields.put("type", "text");
            fields.put("body", text.getText());
        } else if (message instanceof BytesMessage bytes) {
            bytes.reset();
            byte[] content = new byte[(int) bytes.getBodyLength()];
            bytes.readBytes(content);
            fields.put("type", "bytes");
            fields.put("body", Base64.getEncoder().encodeToString(content));
        } else if (message instanceof MapMessage map) {
            Map<String, Object> body = new LinkedHashMap<>();
            for (Enumeration<?> each = map.getMapNames(); each.hasMoreElements(); ) {
                String name = (String) each.nextElement();
                body.put(name, pair(map.getObject(name)));
            }
            fields.put("type", "map");
            fields.put("body", body);
        } else if (message instanceof StreamMessage stream) {
            List<Object> body = new ArrayList<>();
            stream.reset();
            try {
                while (true) body.add(pair(stream.readObject()));
            } catch (MessageEOFException end) {
                fields.put("type", "stream");
                fields.put("body", body);
            }
        } else if (message instanceof ObjectMessage object) {
            fields.put("type", "object");
            fields.put("body", pair(object.getObject()));
        } else {
            fields.put("type", "message");
        }
    }

    static List<Object> pair(Object value) {
        List<Object> pair = new ArrayList<>();
        if (value instanceof byte[] bytes) {
            pair.add("bytes");
            pair.add(Base64.getEncoder().encodeToString(bytes));
        } else if (value == null) {
            pair.add("null");
            pair.add(null);
        } else {
            pair.add(value instanceof Integer ? "int" : value instanceof Character ? "char" : value.getClass().getSimpleName().toLowerCase());
            pair.add(value instanceof Number || value instanceof Boolean ? value : value.toString());
        }
        return pair;
    }
}
