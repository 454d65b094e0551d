import jakarta.jms.*;
import java.util.ArrayList;
import java.util.Enumeration;
import java.util.List;

/** Queue browsers. */
final class Browsers extends Suite {
    Browsers() {
        browsing();
    }

    void browsing() {
        it("browser.sees-everything-and-takes-nothing", c -> {
            c.sendNumbered(c.queue(), 25);
            Check.equal(List.of(Case.numbers(0, 25)), browse(c.session().createBrowser(c.queue())));
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 25));
        });
        it("browser.with-a-selector", c -> {
            c.sendNumbered(c.queue(), 10);
            Check.equal(List.of("8", "9"), browse(c.session().createBrowser(c.queue(), "n >= 8")));
        });
        it("browser.of-an-empty-queue", c -> Check.equal(List.of(), browse(c.session().createBrowser(c.queue()))));
        it("browser.twice", c -> {
            c.sendNumbered(c.queue(), 3);
            QueueBrowser browser = c.session().createBrowser(c.queue());
            Check.equal(browse(browser), browse(browser));
        });
        it("browser.of-more-than-a-prefetch", c -> {
            c.sendNumbered(c.queue(), 300);
            Connection connection = c.connect("jms.prefetchPolicy.queueBrowserPrefetch=20");
            Check.equal(List.of(Case.numbers(0, 300)), browse(connection.createSession().createBrowser(c.queue())));
        });
        it("browser.in-order-of-priority", c -> {
            MessageProducer producer = c.tools().createProducer(c.queue());
            for (int priority : new int[] {1, 9, 4}) producer.send(c.text("" + priority), DeliveryMode.PERSISTENT, priority, 0);
            Check.equal(List.of("9", "4", "1"), browse(c.session().createBrowser(c.queue())));
        });
        it("browser.does-not-mark-as-redelivered", c -> {
            c.send(c.queue(), "x");
            browse(c.session().createBrowser(c.queue()));
            Message got = Case.one(c.session().createConsumer(c.queue()));
            Check.that(!got.getJMSRedelivered(), "not redelivered");
            Check.equal(1, got.getIntProperty("JMSXDeliveryCount"));
        });
        it("browser.beside-a-consumer", c -> {
            MessageConsumer consumer = c.connect("jms.prefetchPolicy.all=0").createSession().createConsumer(c.queue());
            c.sendNumbered(c.queue(), 3);
            Case.gets(consumer, "0");
            Check.equal(List.of("1", "2"), browse(c.session().createBrowser(c.queue())));
        });
        it("browser.tells-queue-and-selector", c -> {
            QueueBrowser browser = c.session().createBrowser(c.queue(), "n = 1");
            Check.equal(c.queue(), browser.getQueue());
            Check.equal("n = 1", browser.getMessageSelector());
        });
        it("browser.with-a-wrong-selector", c ->
                Check.fails(InvalidSelectorException.class, () -> c.session().createBrowser(c.queue(), "n = ")));
    }

    static List<String> browse(QueueBrowser browser) throws JMSException {
        List<String> out = new ArrayList<>();
        for (Enumeration<?> messages = browser.getEnumeration(); messages.hasMoreElements(); ) out.add(Case.textOf((Message) messages.nextElement()));
        return out;
    }
}
