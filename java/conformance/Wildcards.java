import jakarta.jms.*;

/** Subscriptions to patterns of topics. */
final class Wildcards extends Suite {
    Wildcards() {
        wildcards();
    }

    void wildcards() {
        wildcard("wildcard.star-is-one-word", "*", "a b", "a.b a.b.c");
        wildcard("wildcard.star-in-the-middle", "*.x", "a.x b.x", "x a.b.x a.y");
        wildcard("wildcard.hash-is-any-number-of-words", "#", "a a.b a.b.c", "");
        wildcard("wildcard.hash-after-a-word", "a.#", "a a.b a.b.c", "b ab.c");
        wildcard("wildcard.both", "*.x.#", "a.x a.x.y", "x.y a.y");
        wildcard("wildcard.none-matches-itself-alone", "a", "a", "a.b b");
        it("wildcard.destination-is-the-one-sent-to", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.topic("*"));
            c.send(c.topic("a"), "x");
            Check.equal(c.topic("a"), Case.one(consumer).getJMSDestination());
        });
        it("wildcard.durable", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createDurableConsumer(c.topic("#"), "s").close();
            c.send(c.topic("a"), "1");
            c.send(c.topic("a.b"), "2");
            Case.getsJust(session.createDurableConsumer(c.topic("#"), "s"), "1", "2");
        });
        it("wildcard.with-a-selector", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.topic("*"), "n = 1");
            c.sendNumbered(c.topic("a"), 2);
            c.sendNumbered(c.topic("b"), 2);
            Case.getsJust(consumer, "1", "1");
        });
        it("wildcard.overlapping-subscriptions-get-a-copy-each", c -> {
            MessageConsumer narrow = c.session().createConsumer(c.topic("a.*")), wide = c.session().createConsumer(c.topic("#"));
            c.send(c.topic("a.b"), "x");
            Case.getsJust(narrow, "x");
            Case.getsJust(wide, "x");
        });
    }

    /**
     * A subscription to a pattern below the topic of the case gets messages sent to the first names, and no messages sent to the others.
     */
    void wildcard(String id, String pattern, String taken, String others) {
        it(id, c -> {
            MessageConsumer consumer = c.session().createConsumer(c.topic(pattern));
            for (String each : (others + " " + taken).trim().split(" ")) c.send(c.topic(each), each);
            Case.getsJust(consumer, taken.split(" "));
        });
    }
}
