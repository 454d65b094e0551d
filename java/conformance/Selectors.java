import jakarta.jms.*;
import java.util.ArrayList;
import java.util.List;
import java.util.TreeMap;

/**
 * Selectors, each shown the same few messages:
 * a has n = 1 (int), d = 1.5 (double), s = 'apple', b = true, l = 5000000000 (long);
 * b has n = 2, f = 2.0 (float), s = 'banana', b = false;
 * c has n = 3, s = 'a_c%', sh = 3 (short);
 * d has no property; e has n = '2' (a string), s = '', b = 'true' (a string); f has n = -5 (byte), s = 'it''s', u = 'żółć'.
 */
final class Selectors extends Suite {
    static final Object[][] CAST = {
        {"a", "n", 1, "d", 1.5, "s", "apple", "b", true, "l", 5_000_000_000L},
        {"b", "n", 2, "f", 2.0f, "s", "banana", "b", false},
        {"c", "n", 3, "s", "a_c%", "sh", (short) 3},
        {"d"},
        {"e", "n", "2", "s", "", "b", "true"},
        {"f", "n", (byte) -5, "s", "it's", "u", "żółć"},
    };

    Selectors() {
        comparing();
        logic();
        arithmetic();
        sets();
        patterns();
        nulls();
        literals();
        wrong();
        headers();
        consumers();
    }

    void comparing() {
        selects("selector.equal", "n = 2", "b");
        selects("selector.not-equal", "n <> 2", "acf");
        selects("selector.less", "n < 2", "af");
        selects("selector.less-or-equal", "n <= 2", "abf");
        selects("selector.greater", "n > 1", "bc");
        selects("selector.greater-or-equal", "n >= 2", "bc");
        selects("selector.literal-before-the-name", "2 = n", "b");
        selects("selector.exact-and-approximate-compare", "n = 2.0", "b");
        selects("selector.approximate-property", "d = 1.5", "a");
        selects("selector.float-with-exact", "f = 2", "b");
        selects("selector.double-between-ints", "d > 1 AND d < 2", "a");
        selects("selector.long", "l = 5000000000", "a");
        selects("selector.long-with-int", "l > 5", "a");
        selects("selector.byte", "n = -5", "f");
        selects("selector.short", "sh = 3", "c");
        selects("selector.two-properties", "n = sh", "c");
        selects("selector.string-equal", "s = 'apple'", "a");
        selects("selector.string-not-equal", "s <> 'apple'", "bcef");
        selects("selector.string-empty", "s = ''", "e");
        selects("selector.string-is-case-sensitive", "s = 'Apple'", "");
        selects("selector.string-unicode", "u = 'żółć'", "f");
        selects("selector.string-is-no-number", "n = '2'", "e");
        selects("selector.number-is-no-string", "s = 2", "");
        selects("selector.unlike-types-are-not-unequal-either", "s <> 2", "");
        selects("selector.boolean-equal", "b = TRUE", "a");
        selects("selector.boolean-not-equal", "b <> TRUE", "b");
        selects("selector.boolean-is-no-string", "b = 'true'", "e");
        selects("selector.boolean-alone", "b", "a");
        selects("selector.names-are-case-sensitive", "N = 2", "");
    }

    void logic() {
        selects("selector.and", "n = 1 AND b = TRUE", "a");
        selects("selector.or", "n = 1 OR n = 3", "ac");
        selects("selector.not", "NOT (n = 2)", "acef");
        selects("selector.and-before-or", "n = 1 OR n = 2 AND b = TRUE", "a");
        selects("selector.parentheses", "(n = 1 OR n = 2) AND b = FALSE", "b");
        selects("selector.not-before-and", "NOT b AND n = 2", "b");
        selects("selector.unknown-or-true", "missing = 1 OR n = 1", "a");
        selects("selector.unknown-and-true", "missing = 1 AND n = 1", "");
        selects("selector.not-unknown", "NOT (missing = 1)", "");
        selects("selector.not-unknown-and-false", "NOT (missing = 1 AND n = 1)", "bcef");
        selects("selector.words-in-any-case", "n between 1 And 2 oR s liKe 'it%'", "abf");
        selects("selector.true-alone", "TRUE", "abcdef");
        selects("selector.false-alone", "FALSE", "");
        selects("selector.comparison-always-true", "1 = 1", "abcdef");
        selects("selector.white-space", "\n n\t=\r\n 2 \f", "b");
    }

    void arithmetic() {
        selects("selector.plus", "n + 1 = 3", "b");
        selects("selector.minus", "n - 1 = 0", "a");
        selects("selector.times", "n * 2 = 6", "c");
        selects("selector.divided", "n / 2 = 1", "bc");
        selects("selector.divided-approximate", "n / 2.0 = 1.5", "c");
        selects("selector.times-before-plus", "1 + n * 2 = 5", "b");
        selects("selector.arithmetic-in-parentheses", "(1 + n) * 2 = 6", "b");
        selects("selector.unary-minus", "-n = -2", "b");
        selects("selector.unary-plus", "+n = 2", "b");
        selects("selector.minus-a-negative", "n - -1 = 3", "b");
        selects("selector.left-to-right", "10 - n - 1 = 7", "b");
        selects("selector.arithmetic-with-null-is-unknown", "missing + 1 > 0", "");
        selects("selector.arithmetic-of-a-string-is-not-true", "s + 1 > 0", "");
        selects("selector.division-by-zero-is-no-error-for-others", "n / 0 = 1 OR n = 2", "b");
    }

    void sets() {
        selects("selector.between", "n BETWEEN 1 AND 2", "ab");
        selects("selector.not-between", "n NOT BETWEEN 1 AND 2", "cf");
        selects("selector.between-expressions", "n BETWEEN 1 + 1 AND 2 * 2", "bc");
        selects("selector.between-approximate", "d BETWEEN 1 AND 2", "a");
        selects("selector.between-the-wrong-way-round", "n BETWEEN 2 AND 1", "");
        selects("selector.in", "s IN ('apple', 'banana')", "ab");
        selects("selector.in-one", "s IN ('apple')", "a");
        selects("selector.not-in", "s NOT IN ('apple', 'banana')", "cef");
        selects("selector.in-of-null-is-unknown", "missing IN ('a') OR missing NOT IN ('a')", "");
    }

    void patterns() {
        selects("selector.like-percent", "s LIKE 'a%'", "ac");
        selects("selector.like-underscore", "s LIKE '_anana'", "b");
        selects("selector.like-exact", "s LIKE 'apple'", "a");
        selects("selector.like-percent-is-also-nothing", "s LIKE 'apple%'", "a");
        selects("selector.like-in-the-middle", "s LIKE 'b%n%a'", "b");
        selects("selector.like-empty", "s LIKE ''", "e");
        selects("selector.like-everything", "s LIKE '%'", "abcef");
        selects("selector.like-escaped-underscore", "s LIKE 'a\\_%' ESCAPE '\\'", "c");
        selects("selector.like-escaped-percent", "s LIKE '%x%' ESCAPE 'x'", "c");
        selects("selector.not-like", "s NOT LIKE 'a%'", "bef");
        selects("selector.like-is-no-regular-expression", "s LIKE '.*' OR s LIKE 'a+' OR s LIKE '[a-z]%'", "");
        selects("selector.like-of-null-is-unknown", "missing LIKE '%' OR missing NOT LIKE '%'", "");
        selects("selector.like-of-a-number-is-not-true", "n LIKE '2'", "e");
        selects("selector.like-is-case-sensitive", "s LIKE 'A%'", "");
    }

    void nulls() {
        selects("selector.is-null", "n IS NULL", "d");
        selects("selector.is-not-null", "n IS NOT NULL", "abcef");
        selects("selector.is-null-of-what-nobody-sets", "missing IS NULL", "abcdef");
        selects("selector.is-null-and-others", "s IS NULL OR n = 1", "ad");
        selects("selector.null-equals-nothing", "missing = missing", "");
    }

    void literals() {
        selects("selector.quote-in-a-string", "s = 'it''s'", "f");
        selects("selector.string-with-words-in-it", "s = 'AND' OR s = 'apple'", "a");
        selects("selector.hexadecimal", "n = 0x2", "b");
        selects("selector.octal", "n + 8 = 012", "b");
        selects("selector.exponent", "n = 2E0", "b");
        selects("selector.point-without-fraction", "n = 2.", "b");
        selects("selector.point-without-whole", "d = 1 + .5", "a");
        selects("selector.signed-literal", "n > -6 AND n < +1", "f");
        selects("selector.greatest-long", "l < 9223372036854775807", "a");
        selects("selector.empty-is-none", "", "abcdef");
    }

    void wrong() {
        refuses("selector.invalid-operator", "n == 1");
        refuses("selector.invalid-exclamation", "n != 1");
        refuses("selector.invalid-open-string", "s = 'apple");
        refuses("selector.invalid-open-parenthesis", "(n = 1");
        refuses("selector.invalid-closing-parenthesis", "n = 1)");
        refuses("selector.invalid-nothing-after-operator", "n =");
        refuses("selector.invalid-two-operands", "n 1");
        refuses("selector.invalid-keyword-as-name", "AND = 1");
        refuses("selector.invalid-in-without-list", "s IN");
        refuses("selector.invalid-in-empty", "s IN ()");
        refuses("selector.invalid-in-of-numbers", "n IN (1, 2)");
        refuses("selector.invalid-like-of-a-number", "s LIKE 1");
        refuses("selector.invalid-escape-of-two", "s LIKE 'a' ESCAPE 'bc'");
        refuses("selector.invalid-between-without-and", "n BETWEEN 1");
        refuses("selector.invalid-is", "n IS 1");
        refuses("selector.invalid-null-comparison", "n = NULL");
        refuses("selector.invalid-name", "1n = 1");
        refuses("selector.invalid-arithmetic-alone", "n + 1");
        refuses("selector.invalid-string-alone", "'apple'");
        refuses("selector.invalid-not-alone", "NOT");
        brokerRefuses("selector.invalid-comment", "n = 1 /* comment */");
        brokerRefuses("selector.invalid-double-quotes", "s = \"apple\"");
        refuses("selector.invalid-order-of-strings", "'a' > 'b'");
    }

    void headers() {
        it("selector.header-priority", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            for (int priority : new int[] {1, 4, 8}) producer.send(c.text("p" + priority), DeliveryMode.PERSISTENT, priority, 0);
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSPriority >= 4"), "p8", "p4");
        });
        it("selector.header-priority-by-default", c -> {
            c.send(c.queue(), "x");
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSPriority = 4"), "x");
        });
        it("selector.header-delivery-mode", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            producer.send(c.text("kept"), DeliveryMode.PERSISTENT, 4, 0);
            producer.send(c.text("not kept"), DeliveryMode.NON_PERSISTENT, 4, 0);
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSDeliveryMode = 'NON_PERSISTENT'"), "not kept");
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSDeliveryMode = 'PERSISTENT'"), "kept");
        });
        it("selector.header-type", c -> {
            Message message = c.text("x");
            message.setJMSType("car");
            c.tools().createProducer(c.queue()).send(message);
            c.send(c.queue(), "no type");
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSType = 'car'"), "x");
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSType IS NULL"), "no type");
        });
        it("selector.header-correlation-id", c -> {
            Message message = c.text("x");
            message.setJMSCorrelationID("c-1");
            c.send(c.queue(), "other");
            c.tools().createProducer(c.queue()).send(message);
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSCorrelationID = 'c-1'"), "x");
        });
        it("selector.header-message-id", c -> {
            Message message = c.text("x");
            c.send(c.queue(), "other");
            c.tools().createProducer(c.queue()).send(message);
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSMessageID = '" + message.getJMSMessageID() + "'"), "x");
        });
        it("selector.header-correlation-id-that-is-a-message-id", c -> {
            Message first = c.text("request"), answer = c.text("answer");
            c.tools().createProducer(c.queue("requests")).send(first);
            answer.setJMSCorrelationID(first.getJMSMessageID());
            c.tools().createProducer(c.queue()).send(answer);
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSCorrelationID = '" + first.getJMSMessageID() + "'"), "answer");
        });
        it("selector.header-timestamp", c -> {
            long before = System.currentTimeMillis();
            c.send(c.queue(), "x");
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSTimestamp < " + before));
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSTimestamp >= " + before), "x");
        });
        it("selector.jmsx-group", c -> {
            Message message = c.text("x");
            message.setStringProperty("JMSXGroupID", "g");
            message.setIntProperty("JMSXGroupSeq", 2);
            c.send(c.queue(), "other");
            c.tools().createProducer(c.queue()).send(message);
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSXGroupID = 'g' AND JMSXGroupSeq = 2"), "x");
        });
        it("selector.jmsx-that-is-not-there-is-null", c -> {
            c.send(c.queue(), "x");
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSXGroupID IS NULL AND JMSXProducerTXID IS NULL"), "x");
        });
        it("selector.of-the-specification", c -> {
            Message message = c.text("x");
            message.setJMSType("car");
            message.setStringProperty("color", "blue");
            message.setIntProperty("weight", 2600);
            c.tools().createProducer(c.queue()).send(message);
            Case.getsJust(c.session().createConsumer(c.queue(), "JMSType = 'car' AND color = 'blue' AND weight > 2500"), "x");
        });
    }

    void consumers() {
        it("selector.what-is-not-selected-stays", c -> {
            c.sendNumbered(c.queue(), 6);
            Case.getsJust(c.session().createConsumer(c.queue(), "n >= 4"), "4", "5");
            Case.getsJust(c.session().createConsumer(c.queue()), "0", "1", "2", "3");
        });
        it("selector.two-consumers-take-each-their-own", c -> {
            MessageConsumer even = c.session().createConsumer(c.queue(), "n = 0 OR n = 2");
            MessageConsumer odd = c.session().createConsumer(c.queue(), "n = 1 OR n = 3");
            c.sendNumbered(c.queue(), 4);
            Case.getsJust(odd, "1", "3");
            Case.getsJust(even, "0", "2");
        });
        it("selector.many-consumers-of-different-selectors", c -> {
            List<MessageConsumer> consumers = new ArrayList<>();
            for (int i = 0; i < 20; i++) consumers.add(c.tools().createConsumer(c.queue(), "n = " + i));
            c.sendNumbered(c.queue(), 20);
            for (int i = 0; i < 20; i++) Case.getsJust(consumers.get(i), String.valueOf(i));
        });
        it("selector.on-a-deep-queue", c -> {
            c.sendNumbered(c.queue(), 1000);
            Case.getsJust(c.session().createConsumer(c.queue(), "n = 999"), "999");
        });
        it("selector.on-a-topic", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.topic(), "n > 1");
            c.sendNumbered(c.topic(), 4);
            Case.getsJust(consumer, "2", "3");
        });
        it("selector.rolled-back-is-selected-again", c -> {
            c.sendNumbered(c.queue(), 3);
            Session session = c.session(Session.SESSION_TRANSACTED);
            MessageConsumer consumer = session.createConsumer(c.queue(), "n = 1");
            Case.gets(consumer, "1");
            session.rollback();
            Case.gets(consumer, "1");
            session.commit();
            Case.getsJust(c.session().createConsumer(c.queue()), "0", "2");
        });
        it("selector.of-a-very-long-list", c -> {
            TreeMap<Integer, String> terms = new TreeMap<>();
            for (int i = 0; i < 400; i++) terms.put(i, "'v" + i + "'");
            Message message = c.text("x");
            message.setStringProperty("s", "v399");
            c.tools().createProducer(c.queue()).send(message);
            Case.getsJust(c.session().createConsumer(c.queue(), "s IN (" + String.join(", ", terms.values()) + ")"), "x");
        });
    }

    void selects(String id, String selector, String expected) {
        it(id, c -> {
            try (MessageProducer producer = c.tools().createProducer(c.queue())) {
                producer.setDeliveryMode(DeliveryMode.NON_PERSISTENT);
                for (Object[] each : CAST) {
                    TextMessage message = c.text((String) each[0]);
                    for (int i = 1; i < each.length; i += 2) message.setObjectProperty((String) each[i], each[i + 1]);
                    producer.send(message);
                }
            }
            MessageConsumer consumer = c.session().createConsumer(c.queue(), selector);
            StringBuilder got = new StringBuilder();
            // All matching messages are there already, so the broker reports a missing one immediately.
            for (Message message; (message = consumer.receiveNoWait()) != null; ) got.append(Case.textOf(message));
            Check.equal(expected, got.toString());
        });
    }

    void refuses(String id, String selector) {
        it(id, c -> {
            Check.fails(InvalidSelectorException.class, () -> c.session().createConsumer(c.queue(), selector));
            refused(c, selector);
        });
    }

    /** The client accepts it; the broker does not. */
    void brokerRefuses(String id, String selector) {
        it(id, c -> refused(c, selector));
    }

    private static void refused(Case c, String selector) throws JMSException {
        Session unchecked = c.connect("jms.validateSelector=false").createSession();
        Check.fails(JMSException.class, () -> unchecked.createConsumer(c.queue(), selector));
    }
}
