import jakarta.jms.*;
import java.io.Serializable;
import java.lang.reflect.Proxy;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;

/** The kinds of messages and their content. */
final class Bodies extends Suite {
    Bodies() {
        texts();
        bytes();
        maps();
        streams();
        objects();
        everyKind();
        writing();
    }

    void texts() {
        it("text.round-trip", c -> Check.equal("hello", c.through(c.text("hello")).getText()));
        it("text.empty", c -> Check.equal("", c.through(c.text("")).getText()));
        it("text.null", c -> Check.none(c.through(c.text(null)).getText()));
        it("text.set-to-null", c -> {
            TextMessage message = c.text("something");
            message.setText(null);
            Check.none(c.through(message).getText());
        });
        it("text.unicode", c ->
                Check.equal("żółć \u0000 \t\n 𝄞 \uFFFD", c.through(c.text("żółć \u0000 \t\n 𝄞 \uFFFD")).getText()));
        it("text.of-64-ki", c -> {
            String text = "0123456789abcdef".repeat(4096);
            Check.equal(text, c.through(c.text(text)).getText());
        });
        it("text.xml", c -> Check.equal("<a b='c'>&amp;</a>", c.through(c.text("<a b='c'>&amp;</a>")).getText()));
    }

    void bytes() {
        it("bytes.round-trip-of-every-type", c -> {
            BytesMessage sent = c.tools().createBytesMessage();
            sent.writeBoolean(true);
            sent.writeByte((byte) -7);
            sent.writeShort((short) -300);
            sent.writeChar('ж');
            sent.writeInt(Integer.MIN_VALUE);
            sent.writeLong(Long.MAX_VALUE);
            sent.writeFloat(1.5f);
            sent.writeDouble(Math.PI);
            sent.writeUTF("żółć");
            sent.writeBytes(new byte[] {1, 2, 3, 4}, 1, 2);
            sent.writeByte((byte) 200);
            sent.writeShort((short) 60000);
            BytesMessage got = c.through(sent);
            Check.that(got.readBoolean(), "the boolean");
            Check.equal((byte) -7, got.readByte());
            Check.equal((short) -300, got.readShort());
            Check.equal('ж', got.readChar());
            Check.equal(Integer.MIN_VALUE, got.readInt());
            Check.equal(Long.MAX_VALUE, got.readLong());
            Check.equal(1.5f, got.readFloat());
            Check.equal(Math.PI, got.readDouble());
            Check.equal("żółć", got.readUTF());
            byte[] rest = new byte[2];
            Check.equal(2, got.readBytes(rest));
            Check.equal(new byte[] {2, 3}, rest);
            Check.equal(200, got.readUnsignedByte());
            Check.equal(60000, got.readUnsignedShort());
        });
        it("bytes.every-value", c -> {
            byte[] all = new byte[256];
            for (int i = 0; i < 256; i++) all[i] = (byte) i;
            BytesMessage sent = c.tools().createBytesMessage();
            sent.writeBytes(all);
            Check.equal(all, c.through(sent).getBody(byte[].class));
        });
        it("bytes.empty", c -> Check.equal(0L, c.through(c.tools().createBytesMessage()).getBodyLength()));
        it("bytes.length", c -> Check.equal(5L, c.through(bytesOf(c, 1, 2, 3, 4, 5)).getBodyLength()));
        it("bytes.read-past-the-end", c -> {
            BytesMessage got = c.through(bytesOf(c, 1));
            got.readByte();
            Check.fails(MessageEOFException.class, got::readByte);
            Check.equal(-1, got.readBytes(new byte[4]));
        });
        it("bytes.read-again-after-reset", c -> {
            BytesMessage got = c.through(bytesOf(c, 9, 8));
            got.readByte();
            got.reset();
            Check.equal((byte) 9, got.readByte());
        });
        it("bytes.in-parts", c -> {
            BytesMessage got = c.through(bytesOf(c, 1, 2, 3, 4, 5));
            byte[] part = new byte[3];
            Check.equal(3, got.readBytes(part));
            Check.equal(2, got.readBytes(part));
            Check.equal(new byte[] {4, 5, 3}, part);
        });
        it("bytes.write-only-until-reset", c -> {
            BytesMessage message = bytesOf(c, 1);
            Check.fails(MessageNotReadableException.class, message::readByte);
            message.reset();
            Check.equal((byte) 1, message.readByte());
            Check.fails(MessageNotWriteableException.class, () -> message.writeByte((byte) 2));
        });
        it("bytes.object-of-wrong-class", c ->
                Check.fails(MessageFormatException.class, () -> c.tools().createBytesMessage().writeObject(new Object())));
        it("bytes.null-object", c -> Check.fails(NullPointerException.class, () -> c.tools().createBytesMessage().writeObject(null)));
    }

    static BytesMessage bytesOf(Case c, int... values) throws JMSException {
        BytesMessage message = c.tools().createBytesMessage();
        for (int value : values) message.writeByte((byte) value);
        return message;
    }

    void maps() {
        it("map.round-trip-of-every-type", c -> {
            MapMessage sent = c.tools().createMapMessage();
            sent.setBoolean("boolean", true);
            sent.setByte("byte", Byte.MIN_VALUE);
            sent.setShort("short", Short.MAX_VALUE);
            sent.setChar("char", 'ж');
            sent.setInt("int", 42);
            sent.setLong("long", Long.MIN_VALUE);
            sent.setFloat("float", 0.1f);
            sent.setDouble("double", 1e300);
            sent.setString("string", "żółć");
            sent.setBytes("bytes", new byte[] {0, -1});
            MapMessage got = c.through(sent);
            Check.equal(true, got.getBoolean("boolean"));
            Check.equal(Byte.MIN_VALUE, got.getByte("byte"));
            Check.equal(Short.MAX_VALUE, got.getShort("short"));
            Check.equal('ж', got.getChar("char"));
            Check.equal(42, got.getInt("int"));
            Check.equal(Long.MIN_VALUE, got.getLong("long"));
            Check.equal(0.1f, got.getFloat("float"));
            Check.equal(1e300, got.getDouble("double"));
            Check.equal("żółć", got.getString("string"));
            Check.equal(new byte[] {0, -1}, got.getBytes("bytes"));
        });
        it("map.objects-keep-their-class", c -> {
            Object[] values = {true, (byte) 1, (short) 2, 'c', 4, 5L, 6.5f, 7.5, "eight", new byte[] {9}};
            MapMessage sent = c.tools().createMapMessage();
            for (Object value : values) sent.setObject(value.getClass().getSimpleName(), value);
            MapMessage got = c.through(sent);
            for (Object value : values) Check.equal(value, got.getObject(value.getClass().getSimpleName()));
        });
        it("map.names", c -> {
            MapMessage sent = c.tools().createMapMessage();
            for (String name : List.of("a", "b c", "ż", "JMSType")) sent.setString(name, name);
            Check.equal(Set.of("a", "b c", "ż", "JMSType"),
                    Set.copyOf(Collections.list((java.util.Enumeration<?>) c.through(sent).getMapNames())));
        });
        it("map.item-exists", c -> {
            MapMessage sent = c.tools().createMapMessage();
            sent.setString("null", null);
            MapMessage got = c.through(sent);
            Check.that(got.itemExists("null"), "an item that is null exists");
            Check.that(!got.itemExists("other"), "an item that was not set does not");
            Check.none(got.getString("null"));
            Check.none(got.getObject("other"));
        });
        it("map.empty", c -> Check.that(!c.through(c.tools().createMapMessage()).getMapNames().hasMoreElements(), "no names"));
        it("map.name-empty-or-null", c -> {
            MapMessage message = c.tools().createMapMessage();
            Check.fails(IllegalArgumentException.class, () -> message.setInt("", 1));
            Check.fails(IllegalArgumentException.class, () -> message.setInt(null, 1));
        });
        it("map.object-of-wrong-class", c ->
                Check.fails(MessageFormatException.class, () -> c.tools().createMapMessage().setObject("a", new Object())));
        it("map.bytes-are-copied", c -> {
            byte[] bytes = {1, 2, 3};
            MapMessage message = c.tools().createMapMessage();
            message.setBytes("a", bytes, 1, 2);
            bytes[1] = 9;
            Check.equal(new byte[] {2, 3}, c.through(message).getBytes("a"));
        });
        it("map.many-items", c -> {
            MapMessage sent = c.tools().createMapMessage();
            for (int i = 0; i < 1000; i++) sent.setInt("item" + i, i);
            MapMessage got = c.through(sent);
            for (int i = 0; i < 1000; i++) Check.equal(i, got.getInt("item" + i));
        });
    }

    void streams() {
        it("stream.round-trip-of-every-type", c -> {
            Object[] values = {true, (byte) -1, (short) 2, 'ж', 4, 5L, 6.5f, 7.5, "żółć", new byte[] {9, 8}};
            StreamMessage sent = c.tools().createStreamMessage();
            sent.writeBoolean(true);
            sent.writeByte((byte) -1);
            sent.writeShort((short) 2);
            sent.writeChar('ж');
            sent.writeInt(4);
            sent.writeLong(5);
            sent.writeFloat(6.5f);
            sent.writeDouble(7.5);
            sent.writeString("żółć");
            sent.writeBytes(new byte[] {9, 8});
            StreamMessage got = c.through(sent);
            for (Object value : values) Check.equal(value, got.readObject());
        });
        it("stream.typed-reads", c -> {
            StreamMessage sent = c.tools().createStreamMessage();
            for (Object value : new Object[] {true, (byte) 1, (short) 2, 'c', 4, 5L, 6.5f, 7.5, "eight"}) sent.writeObject(value);
            StreamMessage got = c.through(sent);
            Check.that(got.readBoolean(), "the boolean");
            Check.equal((byte) 1, got.readByte());
            Check.equal((short) 2, got.readShort());
            Check.equal('c', got.readChar());
            Check.equal(4, got.readInt());
            Check.equal(5L, got.readLong());
            Check.equal(6.5f, got.readFloat());
            Check.equal(7.5, got.readDouble());
            Check.equal("eight", got.readString());
        });
        it("stream.end", c -> {
            StreamMessage sent = c.tools().createStreamMessage();
            sent.writeInt(1);
            StreamMessage got = c.through(sent);
            got.readInt();
            Check.fails(MessageEOFException.class, got::readInt);
            Check.fails(MessageEOFException.class, got::readObject);
        });
        it("stream.empty", c -> Check.fails(MessageEOFException.class, c.through(c.tools().createStreamMessage())::readObject));
        it("stream.null", c -> {
            StreamMessage sent = c.tools().createStreamMessage();
            sent.writeString(null);
            sent.writeObject(null);
            StreamMessage got = c.through(sent);
            Check.none(got.readString());
            Check.none(got.readObject());
        });
        it("stream.bytes-in-parts", c -> {
            StreamMessage sent = c.tools().createStreamMessage();
            sent.writeBytes(new byte[] {1, 2, 3, 4, 5});
            sent.writeInt(6);
            StreamMessage got = c.through(sent);
            byte[] part = new byte[3];
            Check.equal(3, got.readBytes(part));
            Check.equal(2, got.readBytes(part));
            Check.equal(6, got.readInt());
        });
        it("stream.position-stays-on-a-failed-read", c -> {
            StreamMessage sent = c.tools().createStreamMessage();
            sent.writeString("no number");
            sent.writeObject(true);
            StreamMessage got = c.through(sent);
            Check.fails(NumberFormatException.class, got::readInt);
            Check.equal("no number", got.readString());
            Check.fails(MessageFormatException.class, got::readInt);
            Check.that(got.readBoolean(), "the boolean");
        });
        it("stream.read-again-after-reset", c -> {
            StreamMessage sent = c.tools().createStreamMessage();
            sent.writeInt(1);
            StreamMessage got = c.through(sent);
            got.readInt();
            got.reset();
            Check.equal(1, got.readInt());
        });
        it("stream.write-only-until-reset", c -> {
            StreamMessage message = c.tools().createStreamMessage();
            message.writeInt(1);
            Check.fails(MessageNotReadableException.class, message::readInt);
        });
        it("stream.object-of-wrong-class", c ->
                Check.fails(MessageFormatException.class, () -> c.tools().createStreamMessage().writeObject(new Object())));
    }

    void objects() {
        it("object.string", c -> Check.equal("hello", c.through(c.tools().createObjectMessage("hello")).getObject()));
        it("object.collection", c -> {
            HashMap<String, List<Integer>> value = new HashMap<>(Map.of("a", List.of(1, 2)));
            Check.equal(value, c.through(c.tools().createObjectMessage(value)).getObject());
        });
        it("object.null", c -> Check.none(c.through(c.tools().createObjectMessage()).getObject()));
        it("object.is-copied", c -> {
            java.util.ArrayList<String> value = new java.util.ArrayList<>(List.of("before"));
            ObjectMessage message = c.tools().createObjectMessage(value);
            value.set(0, "after");
            Check.equal(List.of("before"), c.through(message).getObject());
        });
        it("object.amqp-typed", c -> {
            ObjectMessage message = c.tools().createObjectMessage();
            message.setBooleanProperty("JMS_AMQP_TYPED_ENCODING", true);
            message.setObject(new HashMap<>(Map.of("n", 1, "s", "x")));
            Check.equal(Map.of("n", 1, "s", "x"), c.through(message).getObject());
        });
        it("object.opaque-to-whom-it-is-not-allowed", c -> {
            c.tools().createProducer(c.queue()).send(c.tools().createObjectMessage(new java.util.Date(0)));
            Connection careful = c.connect("jms.deserializationPolicy.denyList=java.util");
            ObjectMessage got = (ObjectMessage) Case.one(careful.createSession().createConsumer(c.queue()));
            Check.fails(JMSException.class, got::getObject);
        });
    }

    void everyKind() {
        it("message.without-a-body", c -> {
            Message sent = c.tools().createMessage();
            sent.setStringProperty("a", "b");
            Message got = c.through(sent);
            Check.that(!(got instanceof TextMessage || got instanceof BytesMessage || got instanceof MapMessage),
                    "a plain message, but " + got.getClass());
            Check.equal("b", got.getStringProperty("a"));
        });
        it("message.kind-stays", c -> {
            Session s = c.tools();
            List<Message> messages = List.of(s.createTextMessage(), s.createBytesMessage(), s.createMapMessage(), s.createStreamMessage(),
                    s.createObjectMessage());
            List<Class<?>> kinds = List.of(TextMessage.class, BytesMessage.class, MapMessage.class, StreamMessage.class,
                    ObjectMessage.class);
            for (int i = 0; i < messages.size(); i++) {
                Check.that(kinds.get(i).isInstance(c.through(messages.get(i))), "a " + kinds.get(i).getSimpleName());
            }
        });
        it("body.of-text", c -> {
            Message got = c.through(c.text("x"));
            Check.equal("x", got.getBody(String.class));
            Check.equal("x", got.getBody(Object.class));
            Check.that(got.isBodyAssignableTo(CharSequence.class), "a text is a CharSequence");
            Check.that(!got.isBodyAssignableTo(Integer.class), "a text is no Integer");
            Check.fails(MessageFormatException.class, () -> got.getBody(Map.class));
        });
        it("body.of-bytes", c -> {
            BytesMessage got = c.through(bytesOf(c, 1, 2));
            Check.that(got.isBodyAssignableTo(byte[].class), "bytes are byte[]");
            Check.equal(new byte[] {1, 2}, got.getBody(byte[].class));
            Check.fails(MessageFormatException.class, () -> got.getBody(String.class));
        });
        it("body.of-map", c -> {
            MapMessage sent = c.tools().createMapMessage();
            sent.setInt("a", 1);
            MapMessage got = c.through(sent);
            Check.that(got.isBodyAssignableTo(Map.class), "a map is a Map");
            Check.equal(1, got.getBody(Map.class).get("a"));
        });
        it("body.of-object", c -> {
            Message got = c.through(c.tools().createObjectMessage("x"));
            Check.equal("x", got.getBody(Serializable.class));
            Check.that(!got.isBodyAssignableTo(Map.class), "a String is no Map");
        });
        it("body.of-stream-cannot-be-taken-whole", c -> {
            StreamMessage sent = c.tools().createStreamMessage();
            sent.writeInt(1);
            StreamMessage got = c.through(sent);
            Check.that(!got.isBodyAssignableTo(Object.class), "a stream is assignable to nothing");
            Check.fails(MessageFormatException.class, () -> got.getBody(Object.class));
        });
        it("body.of-none", c -> {
            Message got = c.through(c.tools().createMessage());
            Check.none(got.getBody(Map.class));
            Check.that(got.isBodyAssignableTo(Integer.class), "no body is assignable to anything");
        });
        it("message.foreign-implementation", c -> {
            TextMessage foreign = (TextMessage) Proxy.newProxyInstance(Bodies.class.getClassLoader(), new Class<?>[] {TextMessage.class},
                    (proxy, method, arguments) -> switch (method.getName()) {
                        case "getText", "getBody" -> "from elsewhere";
                        case "getJMSType" -> "foreign";
                        case "getPropertyNames" -> Collections.enumeration(List.of("n"));
                        case "getObjectProperty" -> 7;
                        case "getJMSDeliveryMode" -> DeliveryMode.PERSISTENT;
                        default -> method.getReturnType() == int.class ? (Object) 0 : method.getReturnType() == long.class ? (Object) 0L
                                : method.getReturnType() == boolean.class ? (Object) false : null;
                    });
            TextMessage got = c.through(foreign);
            Check.equal("from elsewhere", got.getText());
            Check.equal("foreign", got.getJMSType());
            Check.equal(7, got.getIntProperty("n"));
        });
    }

    void writing() {
        it("message.received-body-is-read-only", c -> {
            TextMessage got = c.through(c.text("x"));
            Check.fails(MessageNotWriteableException.class, () -> got.setText("y"));
            got.clearBody();
            got.setText("y");
            Check.equal("y", got.getText());
        });
        it("message.received-map-is-read-only", c ->
                Check.fails(MessageNotWriteableException.class, () -> c.through(c.tools().createMapMessage()).setInt("a", 1)));
        it("message.received-bytes-are-read-only", c ->
                Check.fails(MessageNotWriteableException.class, () -> c.through(bytesOf(c, 1)).writeInt(1)));
        it("message.received-stream-is-read-only", c ->
                Check.fails(MessageNotWriteableException.class, () -> c.through(c.tools().createStreamMessage()).writeInt(1)));
        it("message.received-object-is-read-only", c ->
                Check.fails(MessageNotWriteableException.class, () -> c.through(c.tools().createObjectMessage("x")).setObject("y")));
        it("message.cleared-body-keeps-the-properties", c -> {
            TextMessage message = c.text("x");
            message.setIntProperty("n", 1);
            message.clearBody();
            Message got = c.through(message);
            Check.equal(1, got.getIntProperty("n"));
            Check.none(got.getBody(String.class));
        });
        it("message.cleared-bytes-are-empty-and-writeable", c -> {
            BytesMessage got = c.through(bytesOf(c, 1, 2));
            got.clearBody();
            got.writeByte((byte) 7);
            Check.equal(new byte[] {7}, c.through(got).getBody(byte[].class));
        });
        it("message.sent-again-is-another", c -> {
            Message message = c.text("x");
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.send(message);
            String first = message.getJMSMessageID();
            producer.send(message);
            Check.that(!first.equals(message.getJMSMessageID()), "another id");
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            Check.equal(first, Case.one(consumer).getJMSMessageID());
            Check.equal(message.getJMSMessageID(), Case.one(consumer).getJMSMessageID());
        });
        it("message.changed-after-the-send", c -> {
            TextMessage message = c.text("as sent");
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.send(message);
            message.setText("changed");
            Case.getsJust(c.session().createConsumer(c.queue()), "as sent");
        });
        it("message.received-is-forwarded", c -> {
            TextMessage sent = c.text("x");
            sent.setStringProperty("a", "b");
            sent.setJMSCorrelationID("c");
            TextMessage got = c.through(c.through(sent));
            Check.equal(Arrays.asList("x", "b", "c"), Arrays.asList(got.getText(), got.getStringProperty("a"), got.getJMSCorrelationID()));
        });
        it("message.sent-by-another-session-than-made-it", c -> {
            TextMessage message = c.connect().createSession().createTextMessage("x");
            Check.equal("x", c.through(message).getText());
        });
    }
}
