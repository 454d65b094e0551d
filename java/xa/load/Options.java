package bascule.load;

import jakarta.jms.JMSException;
import jakarta.jms.XAConnectionFactory;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/** The command line. */
final class Options {
    private final Map<String, String> given = new HashMap<>();
    private final String body;

    Options(String[] arguments) {
        for (int i = 0; i + 1 < arguments.length; i += 2) {
            given.put(arguments[i].substring(2), arguments[i + 1]);
        }
        body = "x".repeat(number("size"));
    }

    String text(String name) {
        String value = given.get(name);
        if (value == null) {
            throw new IllegalArgumentException("--" + name + " is missing");
        }
        return value;
    }

    int number(String name) {
        return Integer.parseInt(text(name));
    }

    long nanos(String name) {
        return (long) (Double.parseDouble(text(name)) * TimeUnit.SECONDS.toNanos(1));
    }

    /** Returns whether a resource, "jms" or "postgres", takes part. */
    boolean uses(String resource) {
        return List.of(text("resources").split(",")).contains(resource);
    }

    /** Returns whether each transaction receives a message before it sends one. */
    boolean receives() {
        return Boolean.parseBoolean(text("receive"));
    }

    String body() {
        return body;
    }

    XAConnectionFactory connectionFactory() throws JMSException {
        return Broker.valueOf(text("broker").toUpperCase(Locale.ROOT)).factory(text("url"));
    }
}
