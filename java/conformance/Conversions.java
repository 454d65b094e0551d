import jakarta.jms.*;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Allowed conversions: properties (table 3-2), map and stream bodies (table 3-7). The broker must keep the type that was set. */
final class Conversions extends Suite {
    interface Getter {
        Object get(String name) throws JMSException;
    }

    interface Reader {
        Object read() throws JMSException;
    }

    Conversions() {
        property("property.boolean-as", true, "boolean", "String");
        property("property.byte-as", (byte) 1, "byte", "short", "int", "long", "String");
        property("property.short-as", (short) 2, "short", "int", "long", "String");
        property("property.int-as", 3, "int", "long", "String");
        property("property.long-as", 4L, "long", "String");
        property("property.float-as", 5.5f, "float", "double", "String");
        property("property.double-as", 6.5, "double", "String");
        property("property.string-as", "7", "boolean", "byte", "short", "int", "long", "float", "double", "String");
        item("map.boolean-as", true, "boolean", "String");
        item("map.byte-as", (byte) 1, "byte", "short", "int", "long", "String");
        item("map.short-as", (short) 2, "short", "int", "long", "String");
        item("map.char-as", 'c', "char", "String");
        item("map.int-as", 3, "int", "long", "String");
        item("map.long-as", 4L, "long", "String");
        item("map.float-as", 5.5f, "float", "double", "String");
        item("map.double-as", 6.5, "double", "String");
        item("map.string-as", "7", "boolean", "byte", "short", "int", "long", "float", "double", "String");
        item("map.bytes-as", new byte[] {8}, "byte[]");
        element("stream.boolean-as", true, "boolean", "String");
        element("stream.byte-as", (byte) 1, "byte", "short", "int", "long", "String");
        element("stream.short-as", (short) 2, "short", "int", "long", "String");
        element("stream.char-as", 'c', "char", "String");
        element("stream.int-as", 3, "int", "long", "String");
        element("stream.long-as", 4L, "long", "String");
        element("stream.float-as", 5.5f, "float", "double", "String");
        element("stream.double-as", 6.5, "double", "String");
        element("stream.string-as", "7", "boolean", "byte", "short", "int", "long", "float", "double", "String");
        element("stream.bytes-as", new byte[] {8}, "byte[]");
        it("property.string-that-is-no-number", c -> {
            Message message = c.text("x");
            message.setStringProperty("p", "seven");
            Message got = c.through(message);
            for (String type : List.of("byte", "short", "int", "long", "float", "double")) {
                Check.fails(NumberFormatException.class, () -> properties(got).get(type).get("p"));
            }
            Check.equal(false, got.getBooleanProperty("p"));
        });
        it("property.missing-as", c -> missing(properties(c.through(c.text("x")))));
        it("map.missing-as", c -> {
            Map<String, Getter> getters = map(c.through(c.tools().createMapMessage()));
            Check.fails(NullPointerException.class, () -> getters.get("char").get("p"));
            Check.none(getters.get("byte[]").get("p"));
            missing(getters);
        });
        it("map.string-that-is-no-number", c -> {
            MapMessage message = c.tools().createMapMessage();
            message.setString("p", "seven");
            Map<String, Getter> getters = map(c.through(message));
            for (String type : List.of("byte", "short", "int", "long", "float", "double")) {
                Check.fails(NumberFormatException.class, () -> getters.get(type).get("p"));
            }
        });
        it("stream.null-as", c -> {
            StreamMessage message = c.tools().createStreamMessage();
            message.writeString(null);
            Map<String, Reader> readers = stream(c.through(message));
            for (String type : List.of("byte", "short", "int", "long")) {
                Check.fails(NumberFormatException.class, () -> readers.get(type).read());
            }
            Check.fails(NullPointerException.class, () -> readers.get("float").read());
            Check.fails(NullPointerException.class, () -> readers.get("char").read());
            Check.equal(false, readers.get("boolean").read());
        });
    }

    /** A missing value is read as valueOf(null) of each primitive type. */
    static void missing(Map<String, Getter> getters) throws JMSException {
        for (String type : List.of("byte", "short", "int", "long")) {
            Check.fails(NumberFormatException.class, () -> getters.get(type).get("p"));
        }
        for (String type : List.of("float", "double")) Check.fails(NullPointerException.class, () -> getters.get(type).get("p"));
        Check.equal(false, getters.get("boolean").get("p"));
        Check.none(getters.get("String").get("p"));
    }

    void property(String id, Object value, String... readable) {
        it(id, c -> {
            Message message = c.text("x");
            message.setObjectProperty("p", value);
            Message got = c.through(message);
            Check.equal(value, got.getObjectProperty("p"));
            properties(got).forEach((type, getter) -> reads(type, () -> getter.get("p"), value, List.of(readable)));
        });
    }

    void item(String id, Object value, String... readable) {
        it(id, c -> {
            MapMessage message = c.tools().createMapMessage();
            message.setObject("p", value);
            map(c.through(message)).forEach((type, getter) -> reads(type, () -> getter.get("p"), value, List.of(readable)));
        });
    }

    void element(String id, Object value, String... readable) {
        it(id, c -> {
            StreamMessage message = c.tools().createStreamMessage();
            message.writeObject(value);
            StreamMessage got = c.through(message);
            stream(got).forEach((type, reader) -> {
                rewind(got);
                reads(type, reader, value, List.of(readable));
            });
        });
    }

    static void rewind(StreamMessage message) {
        try {
            message.reset();
        } catch (JMSException error) {
            throw new java.lang.IllegalStateException(error);
        }
    }

    static void reads(String type, Reader reader, Object value, List<String> readable) {
        if (!readable.contains(type)) {
            Check.fails(MessageFormatException.class, reader::read);
            return;
        }
        try {
            Check.equal(as(type, value), reader.read());
        } catch (JMSException error) {
            throw new Check.Failed(value.getClass().getSimpleName() + " as " + type + ": " + error);
        }
    }

    static Object as(String type, Object value) {
        String text = String.valueOf(value);
        return switch (type) {
            case "boolean" -> Boolean.valueOf(text);
            case "byte" -> Byte.valueOf(text);
            case "short" -> Short.valueOf(text);
            case "int" -> Integer.valueOf(text);
            case "long" -> Long.valueOf(text);
            case "float" -> Float.valueOf(text);
            case "double" -> Double.valueOf(text);
            case "String" -> text;
            default -> value; // char, byte[]
        };
    }

    static Map<String, Getter> properties(Message message) {
        Map<String, Getter> out = new LinkedHashMap<>();
        out.put("boolean", message::getBooleanProperty);
        out.put("byte", message::getByteProperty);
        out.put("short", message::getShortProperty);
        out.put("int", message::getIntProperty);
        out.put("long", message::getLongProperty);
        out.put("float", message::getFloatProperty);
        out.put("double", message::getDoubleProperty);
        out.put("String", message::getStringProperty);
        return out;
    }

    static Map<String, Getter> map(MapMessage message) {
        Map<String, Getter> out = new LinkedHashMap<>();
        out.put("boolean", message::getBoolean);
        out.put("byte", message::getByte);
        out.put("short", message::getShort);
        out.put("char", message::getChar);
        out.put("int", message::getInt);
        out.put("long", message::getLong);
        out.put("float", message::getFloat);
        out.put("double", message::getDouble);
        out.put("String", message::getString);
        out.put("byte[]", message::getBytes);
        return out;
    }

    static Map<String, Reader> stream(StreamMessage message) {
        Map<String, Reader> out = new LinkedHashMap<>();
        out.put("boolean", message::readBoolean);
        out.put("byte", message::readByte);
        out.put("short", message::readShort);
        out.put("char", message::readChar);
        out.put("int", message::readInt);
        out.put("long", message::readLong);
        out.put("float", message::readFloat);
        out.put("double", message::readDouble);
        out.put("String", message::readString);
        out.put("byte[]", () -> {
            byte[] buffer = new byte[16];
            return java.util.Arrays.copyOf(buffer, message.readBytes(buffer));
        });
        return out;
    }
}
