import jakarta.jms.*;
import java.util.Collections;
import java.util.Enumeration;
import java.util.HashSet;
import java.util.List;
import java.util.Set;

/** Application properties: types, names, and what is refused. */
final class Properties extends Suite {
    Properties() {
        keeps("property.true", true);
        keeps("property.false", false);
        keeps("property.byte", (byte) 17);
        keeps("property.byte-least", Byte.MIN_VALUE);
        keeps("property.short", (short) 1700);
        keeps("property.short-greatest", Short.MAX_VALUE);
        keeps("property.int", 170_000);
        keeps("property.int-zero", 0);
        keeps("property.int-least", Integer.MIN_VALUE);
        keeps("property.int-greatest", Integer.MAX_VALUE);
        keeps("property.long", 17_000_000_000L);
        keeps("property.long-least", Long.MIN_VALUE);
        keeps("property.long-small", 1L);
        keeps("property.float", 1.25f);
        keeps("property.float-not-a-number", Float.NaN);
        keeps("property.float-infinite", Float.NEGATIVE_INFINITY);
        keeps("property.double", -1.1);
        keeps("property.double-not-a-number", Double.NaN);
        keeps("property.double-infinite", Double.POSITIVE_INFINITY);
        keeps("property.double-least", Double.MIN_VALUE);
        keeps("property.string", "text");
        keeps("property.string-empty", "");
        keeps("property.string-unicode", "żółć 𝄞");
        keeps("property.string-long", "x".repeat(70_000));
        keeps("property.string-that-looks-like-a-number", "2");
        keeps("property.null", null);
        it("property.names", c -> {
            Message message = c.text("x");
            for (String name : List.of("a", "_b", "$c", "żółć", "camelCase9")) message.setIntProperty(name, 1);
            Set<Object> names = new HashSet<>(Collections.list((Enumeration<?>) c.through(message).getPropertyNames()));
            Check.that(names.containsAll(Set.of("a", "_b", "$c", "żółć", "camelCase9")), "all names, got " + names);
            Check.that(names.stream().allMatch(name -> !name.toString().startsWith("JMS") || name.toString().startsWith("JMSX")),
                    "no header field among " + names);
        });
        it("property.exists", c -> {
            Message message = c.text("x");
            message.setObjectProperty("null", null);
            Message got = c.through(message);
            Check.that(got.propertyExists("null"), "a property that is null exists");
            Check.that(!got.propertyExists("other"), "a property that was not set does not");
        });
        it("property.many", c -> {
            Message message = c.text("x");
            for (int i = 0; i < 500; i++) message.setIntProperty("p" + i, i);
            Message got = c.through(message);
            for (int i = 0; i < 500; i++) Check.equal(i, got.getIntProperty("p" + i));
        });
        it("property.received-are-read-only", c -> {
            Message got = c.through(c.text("x"));
            Check.fails(MessageNotWriteableException.class, () -> got.setIntProperty("n", 1));
            got.clearProperties();
            got.setIntProperty("n", 1);
            Check.equal(1, got.getIntProperty("n"));
        });
        it("property.cleared-keep-the-body", c -> {
            TextMessage message = c.text("x");
            message.setIntProperty("n", 1);
            message.clearProperties();
            TextMessage got = c.through(message);
            Check.that(!got.propertyExists("n"), "the property is gone");
            Check.equal("x", got.getText());
        });
        it("property.object-of-wrong-class", c -> {
            Message message = c.text("x");
            Check.fails(MessageFormatException.class, () -> message.setObjectProperty("p", List.of()));
            Check.fails(MessageFormatException.class, () -> message.setObjectProperty("p", new byte[1]));
        });
        it("property.name-empty-or-null", c -> {
            Message message = c.text("x");
            Check.fails(IllegalArgumentException.class, () -> message.setIntProperty("", 1));
            Check.fails(IllegalArgumentException.class, () -> message.setIntProperty(null, 1));
        });
        it("property.name-that-is-no-identifier", c -> {
            Message message = c.text("x");
            for (String name : List.of("1a", "a-b", "a b", "NULL", "TRUE", "AND", "LIKE")) {
                Check.fails(IllegalArgumentException.class, () -> message.setIntProperty(name, 1));
            }
        });
        it("property.set-twice", c -> {
            Message message = c.text("x");
            message.setIntProperty("p", 1);
            message.setStringProperty("p", "two");
            Check.equal("two", c.through(message).getObjectProperty("p"));
        });
        it("property.names-differ-by-case", c -> {
            Message message = c.text("x");
            message.setIntProperty("p", 1);
            message.setIntProperty("P", 2);
            Message got = c.through(message);
            Check.equal(List.of(1, 2), List.of(got.getIntProperty("p"), got.getIntProperty("P")));
        });
    }

    void keeps(String id, Object value) {
        it(id, c -> {
            Message message = c.text("x");
            message.setObjectProperty("p", value);
            Message got = c.through(message);
            Check.that(got.propertyExists("p"), "the property exists");
            Check.equal(value, got.getObjectProperty("p"));
        });
    }
}
