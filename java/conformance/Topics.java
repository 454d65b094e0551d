import jakarta.jms.*;
import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;

/** Topics: each kind of subscription, what it keeps and when it ends. */
final class Topics extends Suite {
    Topics() {
        volatiles();
        durables();
        shared();
        sharedDurables();
        noLocal();
        names();
    }

    void volatiles() {
        it("topic.every-subscriber-gets-every-message", c -> {
            MessageConsumer one = c.session().createConsumer(c.topic()), two = c.connect().createSession().createConsumer(c.topic());
            c.send(c.topic(), "a", "b");
            Case.getsJust(one, "a", "b");
            Case.getsJust(two, "a", "b");
        });
        it("topic.subscriber-gets-what-comes-after-it", c -> {
            c.send(c.topic(), "before");
            MessageConsumer consumer = c.session().createConsumer(c.topic());
            c.send(c.topic(), "after");
            Case.getsJust(consumer, "after");
        });
        it("topic.without-subscribers-takes-messages", c -> c.send(c.topic(), "x", "y"));
        it("topic.subscription-ends-with-its-consumer", c -> {
            c.session().createConsumer(c.topic()).close();
            c.send(c.topic(), "meanwhile");
            Case.nothing(c.session().createConsumer(c.topic()));
        });
        it("topic.two-consumers-of-a-session-are-two-subscriptions", c -> {
            Session session = c.session();
            MessageConsumer one = session.createConsumer(c.topic()), two = session.createConsumer(c.topic());
            c.send(c.topic(), "x");
            Case.getsJust(one, "x");
            Case.getsJust(two, "x");
        });
        it("topic.acknowledging-one-copy-leaves-the-others", c -> {
            Session session = c.session(Session.CLIENT_ACKNOWLEDGE);
            MessageConsumer one = session.createConsumer(c.topic()), two = c.session(Session.CLIENT_ACKNOWLEDGE).createConsumer(c.topic());
            c.send(c.topic(), "x");
            Case.one(one).acknowledge();
            Case.gets(two, "x");
        });
        it("topic.keeps-the-order", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.topic());
            c.sendNumbered(c.topic(), 200);
            Case.getsJust(consumer, Case.numbers(0, 200));
        });
        it("topic.selectors-of-several-subscribers", c -> {
            MessageConsumer low = c.session().createConsumer(c.topic(), "n < 2"), high = c.session().createConsumer(c.topic(), "n >= 2");
            c.sendNumbered(c.topic(), 4);
            Case.getsJust(low, "0", "1");
            Case.getsJust(high, "2", "3");
        });
        it("topic.priority", c -> {
            Connection stopped = c.keep(c.factory().createConnection());
            stopped.setClientID(c.name);
            stopped.createSession().createDurableConsumer(c.topic(), "s").close();
            MessageProducer producer = c.tools().createProducer(c.topic());
            for (int priority : new int[] {1, 9, 4}) producer.send(c.text("" + priority), DeliveryMode.PERSISTENT, priority, 0);
            stopped.start();
            Case.getsJust(stopped.createSession().createDurableConsumer(c.topic(), "s"), "9", "4", "1");
        });
        it("topic.many-subscribers", c -> {
            List<MessageConsumer> consumers = new ArrayList<>();
            for (int i = 0; i < 50; i++) consumers.add(c.tools().createConsumer(c.topic()));
            c.send(c.topic(), "x");
            for (MessageConsumer each : consumers) Case.gets(each, "x");
        });
        it("topic.slow-subscriber-holds-no-other-back", c -> {
            c.connect("jms.prefetchPolicy.all=1").createSession(Session.CLIENT_ACKNOWLEDGE).createConsumer(c.topic());
            MessageConsumer quick = c.session().createConsumer(c.topic());
            c.sendNumbered(c.topic(), 100);
            Case.getsJust(quick, Case.numbers(0, 100));
        });
        it("topic.legacy-interfaces", c -> {
            TopicConnection connection = c.keep(c.factory().createTopicConnection());
            connection.start();
            TopicSession session = connection.createTopicSession(false, Session.AUTO_ACKNOWLEDGE);
            TopicSubscriber subscriber = session.createSubscriber(c.topic(), "n = 1", false);
            Check.equal(c.topic(), subscriber.getTopic());
            TextMessage message = session.createTextMessage("x");
            message.setIntProperty("n", 1);
            session.createPublisher(c.topic()).publish(message);
            Case.getsJust(subscriber, "x");
            for (Check.Action each : List.<Check.Action>of(() -> session.createBrowser(c.queue()), () -> session.createQueue("q"),
                    session::createTemporaryQueue)) {
                Check.fails(jakarta.jms.IllegalStateException.class, each);
            }
        });
        it("topic.requestor", c -> {
            TopicConnection connection = c.keep(c.factory().createTopicConnection());
            connection.start();
            TopicSession session = connection.createTopicSession(false, Session.AUTO_ACKNOWLEDGE);
            Session server = c.session();
            MessageProducer answers = server.createProducer(null);
            server.createConsumer(c.topic()).setMessageListener(request -> {
                try {
                    answers.send(request.getJMSReplyTo(), server.createTextMessage("re: " + Case.textOf(request)));
                } catch (JMSException error) {
                    throw new java.lang.IllegalStateException(error);
                }
            });
            Check.equal("re: x", Case.textOf(new TopicRequestor(session, c.topic()).request(session.createTextMessage("x"))));
        });
    }

    void durables() {
        it("durable.gathers-while-its-client-is-away", c -> {
            Connection client = c.connectAs(c.name);
            client.createSession().createDurableConsumer(c.topic(), "s").close();
            c.send(c.topic(), "0", "1");
            client.close();
            c.send(c.topic(), "2");
            Case.getsJust(c.connectAs(c.name).createSession().createDurableConsumer(c.topic(), "s"), "0", "1", "2");
        });
        it("durable.by-the-method-of-jms-1-1", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createDurableSubscriber(c.topic(), "s").close();
            c.send(c.topic(), "x");
            Case.getsJust(session.createDurableSubscriber(c.topic(), "s"), "x");
        });
        it("durable.needs-a-client-id", c ->
                Check.fails(jakarta.jms.IllegalStateException.class, () -> c.session().createDurableConsumer(c.topic(), "s")));
        it("durable.has-one-consumer", c -> {
            Connection client = c.connectAs(c.name);
            client.createSession().createDurableConsumer(c.topic(), "s");
            Check.fails(JMSException.class, () -> client.createSession().createDurableConsumer(c.topic(), "s"));
        });
        it("durable.same-name-of-another-client-is-another", c -> {
            c.connectAs(c.name + ".1").createSession().createDurableConsumer(c.topic(), "s").close();
            Session other = c.connectAs(c.name + ".2").createSession();
            c.send(c.topic(), "x");
            Case.nothing(other.createDurableConsumer(c.topic(), "s"));
        });
        it("durable.unsubscribe-deletes-it", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createDurableConsumer(c.topic(), "s").close();
            c.send(c.topic(), "lost");
            session.unsubscribe("s");
            Case.nothing(session.createDurableConsumer(c.topic(), "s"));
        });
        it("durable.unsubscribe-with-a-consumer-is-refused", c -> {
            Session session = c.connectAs(c.name).createSession();
            MessageConsumer consumer = session.createDurableConsumer(c.topic(), "s");
            Check.fails(JMSException.class, () -> session.unsubscribe("s"));
            c.send(c.topic(), "x");
            Case.gets(consumer, "x");
        });
        it("durable.unsubscribe-of-what-is-not-there", c ->
                Check.fails(InvalidDestinationException.class, () -> c.connectAs(c.name).createSession().unsubscribe("never")));
        it("durable.unsubscribe-by-another-connection-of-the-client", c -> {
            Connection first = c.connectAs(c.name);
            first.createSession().createDurableConsumer(c.topic(), "s");
            first.close();
            Session second = c.connectAs(c.name).createSession();
            second.unsubscribe("s");
            Check.fails(InvalidDestinationException.class, () -> second.unsubscribe("s"));
        });
        it("durable.another-selector-replaces-it", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createDurableConsumer(c.topic(), "s").close();
            c.sendNumbered(c.topic(), 2);
            MessageConsumer consumer = session.createDurableConsumer(c.topic(), "s", "n = 1", false);
            c.sendNumbered(c.topic(), 3);
            Case.getsJust(consumer, "1");
        });
        it("durable.same-selector-goes-on", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createDurableConsumer(c.topic(), "s", "n = 1", false).close();
            c.sendNumbered(c.topic(), 3);
            Case.getsJust(session.createDurableConsumer(c.topic(), "s", "n = 1", false), "1");
        });
        it("durable.without-its-selector-replaces-it", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createDurableConsumer(c.topic(), "s", "n = 1", false).close();
            c.sendNumbered(c.topic(), 3);
            MessageConsumer consumer = session.createDurableConsumer(c.topic(), "s");
            c.send(c.topic(), "x");
            Case.getsJust(consumer, "x");
        });
        it("durable.another-topic-replaces-it", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createDurableConsumer(c.topic("a"), "s").close();
            c.send(c.topic("a"), "lost");
            MessageConsumer consumer = session.createDurableConsumer(c.topic("b"), "s");
            c.send(c.topic("a"), "not mine");
            c.send(c.topic("b"), "mine");
            Case.getsJust(consumer, "mine");
        });
        it("durable.acknowledged-stay-away", c -> {
            Session session = c.connectAs(c.name).createSession();
            MessageConsumer consumer = session.createDurableConsumer(c.topic(), "s");
            c.send(c.topic(), "0", "1");
            Case.gets(consumer, "0");
            consumer.close();
            Case.getsJust(session.createDurableConsumer(c.topic(), "s"), "1");
        });
        it("durable.unacknowledged-come-again-marked", c -> {
            Connection client = c.connectAs(c.name);
            MessageConsumer consumer = client.createSession(Session.CLIENT_ACKNOWLEDGE).createDurableConsumer(c.topic(), "s");
            c.send(c.topic(), "x");
            Case.gets(consumer, "x");
            client.close();
            Message again = Case.one(c.connectAs(c.name).createSession().createDurableConsumer(c.topic(), "s"));
            Check.that(again.getJMSRedelivered(), "marked as redelivered");
        });
        it("durable.transacted", c -> {
            Session session = c.connectAs(c.name).createSession(Session.SESSION_TRANSACTED);
            MessageConsumer consumer = session.createDurableConsumer(c.topic(), "s");
            c.send(c.topic(), "0", "1");
            Case.gets(consumer, "0", "1");
            session.rollback();
            Case.gets(consumer, "0", "1");
            session.commit();
            Case.nothing(consumer);
        });
        it("durable.non-persistent-messages-too", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createDurableConsumer(c.topic(), "s").close();
            c.sendNumbered(c.topic(), 3);
            Case.getsJust(session.createDurableConsumer(c.topic(), "s"), "0", "1", "2");
        });
        it("durable.several-of-a-client", c -> {
            Session session = c.connectAs(c.name).createSession();
            MessageConsumer one = session.createDurableConsumer(c.topic(), "one"), two = session.createDurableConsumer(c.topic(), "two");
            c.send(c.topic(), "x");
            Case.getsJust(one, "x");
            Case.getsJust(two, "x");
        });
    }

    void shared() {
        it("shared.consumers-share-the-messages", c ->
                shares(c, c.connect("jms.prefetchPolicy.all=1").createSession().createSharedConsumer(c.topic(), c.name),
                c.connect("jms.prefetchPolicy.all=1").createSession().createSharedConsumer(c.topic(), c.name)));
        it("shared.of-a-client-id", c -> {
            Connection client = c.connectAs(c.name);
            shares(c, client.createSession().createSharedConsumer(c.topic(), "s"), client.createSession()
                    .createSharedConsumer(c.topic(), "s"));
        });
        it("shared.client-ids-keep-subscriptions-apart", c -> {
            MessageConsumer one = c.connectAs(c.name + ".1").createSession().createSharedConsumer(c.topic(), "s");
            MessageConsumer two = c.connectAs(c.name + ".2").createSession().createSharedConsumer(c.topic(), "s");
            c.send(c.topic(), "x");
            Case.getsJust(one, "x");
            Case.getsJust(two, "x");
        });
        it("shared.without-client-id-apart-from-one-with", c -> {
            MessageConsumer global = c.session().createSharedConsumer(c.topic(), c.name);
            MessageConsumer own = c.connectAs(c.name).createSession().createSharedConsumer(c.topic(), c.name);
            c.send(c.topic(), "x");
            Case.getsJust(global, "x");
            Case.getsJust(own, "x");
        });
        it("shared.ends-with-its-last-consumer", c -> {
            MessageConsumer one = c.session().createSharedConsumer(c.topic(), c.name);
            MessageConsumer two = c.session().createSharedConsumer(c.topic(), c.name);
            one.close();
            c.send(c.topic(), "x");
            Case.gets(two, "x");
            c.send(c.topic(), "lost");
            two.close();
            Case.nothing(c.session().createSharedConsumer(c.topic(), c.name));
        });
        it("shared.another-selector-while-in-use-is-refused", c -> {
            c.session().createSharedConsumer(c.topic(), c.name, "n = 1");
            Check.fails(JMSException.class, () -> c.session().createSharedConsumer(c.topic(), c.name, "n = 2"));
        });
        it("shared.another-topic-while-in-use-is-refused", c -> {
            c.session().createSharedConsumer(c.topic("a"), c.name);
            Check.fails(JMSException.class, () -> c.session().createSharedConsumer(c.topic("b"), c.name));
        });
        it("shared.with-a-selector", c -> {
            MessageConsumer consumer = c.session().createSharedConsumer(c.topic(), c.name, "n = 1");
            c.sendNumbered(c.topic(), 3);
            Case.getsJust(consumer, "1");
        });
        it("shared.and-durable-of-one-name-are-apart", c -> {
            Session session = c.connectAs(c.name).createSession();
            MessageConsumer durable = session.createDurableConsumer(c.topic(), "s"), shared = session.createSharedConsumer(c.topic(), "s");
            c.send(c.topic(), "x");
            Case.getsJust(durable, "x");
            Case.getsJust(shared, "x");
        });
        it("shared.what-a-consumer-leaves-the-other-gets", c -> {
            Connection leaving = c.connect();
            MessageConsumer one = leaving.createSession(Session.CLIENT_ACKNOWLEDGE).createSharedConsumer(c.topic(), c.name);
            c.send(c.topic(), "x");
            Case.gets(one, "x");
            MessageConsumer two = c.session().createSharedConsumer(c.topic(), c.name);
            leaving.close();
            Case.gets(two, "x");
        });
    }

    /** Each message goes to one of the two, and both get some. */
    static void shares(Case c, MessageConsumer one, MessageConsumer two) throws JMSException {
        c.sendNumbered(c.topic(), 40);
        Set<String> first = new TreeSet<>(), second = new TreeSet<>();
        int count = 0;
        for (int idle = 0; count < 40 && idle < 50; idle++) {
            Message a = one.receive(20), b = two.receive(20);
            if (a != null) first.add(Case.textOf(a));
            if (b != null) second.add(Case.textOf(b));
            if (a != null || b != null) idle = 0;
            count = first.size() + second.size();
        }
        Check.that(!first.isEmpty() && !second.isEmpty(), "both got some");
        first.addAll(second);
        Check.equal(40, count);
        Check.equal(40, first.size());
    }

    void sharedDurables() {
        it("shared-durable.consumers-share-the-messages", c -> {
            Session one = c.connect("jms.prefetchPolicy.all=1").createSession();
            Session two = c.connect("jms.prefetchPolicy.all=1").createSession();
            shares(c, one.createSharedDurableConsumer(c.topic(), c.name), two.createSharedDurableConsumer(c.topic(), c.name));
        });
        it("shared-durable.outlives-its-consumers", c -> {
            c.session().createSharedDurableConsumer(c.topic(), c.name).close();
            c.send(c.topic(), "meanwhile");
            Session session = c.connect().createSession();
            MessageConsumer consumer = session.createSharedDurableConsumer(c.topic(), c.name);
            Case.getsJust(consumer, "meanwhile");
            consumer.close();
            session.unsubscribe(c.name);
        });
        it("shared-durable.of-a-client-id", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createSharedDurableConsumer(c.topic(), "s").close();
            c.send(c.topic(), "x");
            Case.getsJust(session.createSharedDurableConsumer(c.topic(), "s"), "x");
        });
        it("shared-durable.of-a-client-id-is-not-everybodys", c -> {
            c.connectAs(c.name).createSession().createSharedDurableConsumer(c.topic(), c.name).close();
            c.send(c.topic(), "x");
            Case.nothing(c.session().createSharedDurableConsumer(c.topic(), c.name));
        });
        it("shared-durable.unsubscribe", c -> {
            Session session = c.session();
            session.createSharedDurableConsumer(c.topic(), c.name).close();
            c.send(c.topic(), "lost");
            session.unsubscribe(c.name);
            Case.nothing(session.createSharedDurableConsumer(c.topic(), c.name));
        });
        it("shared-durable.unsubscribe-in-use-is-refused", c -> {
            Session session = c.session();
            session.createSharedDurableConsumer(c.topic(), c.name);
            Check.fails(JMSException.class, () -> session.unsubscribe(c.name));
        });
        it("shared-durable.another-selector-replaces-it", c -> {
            Session session = c.session();
            session.createSharedDurableConsumer(c.topic(), c.name).close();
            c.sendNumbered(c.topic(), 2);
            MessageConsumer consumer = session.createSharedDurableConsumer(c.topic(), c.name, "n = 1");
            c.sendNumbered(c.topic(), 3);
            Case.getsJust(consumer, "1");
        });
        it("shared-durable.another-selector-in-use-is-refused", c -> {
            c.session().createSharedDurableConsumer(c.topic(), c.name, "n = 1");
            Check.fails(JMSException.class, () -> c.session().createSharedDurableConsumer(c.topic(), c.name, "n = 2"));
        });
        it("shared-durable.another-topic-in-use-is-refused", c -> {
            c.session().createSharedDurableConsumer(c.topic("a"), c.name);
            Check.fails(JMSException.class, () -> c.session().createSharedDurableConsumer(c.topic("b"), c.name));
        });
        it("shared-durable.name-of-an-unshared-one-in-use-is-refused", c -> {
            Connection client = c.connectAs(c.name);
            client.createSession().createDurableConsumer(c.topic(), "s");
            Check.fails(JMSException.class, () -> client.createSession().createSharedDurableConsumer(c.topic(), "s"));
        });
        it("shared-durable.name-of-an-unshared-one-is-refused", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createDurableConsumer(c.topic(), "s").close();
            Check.fails(JMSException.class, () -> session.createSharedDurableConsumer(c.topic(), "s"));
        });
        it("durable.name-of-a-shared-one-is-refused", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createSharedDurableConsumer(c.topic(), "s").close();
            Check.fails(JMSException.class, () -> session.createDurableConsumer(c.topic(), "s"));
        });
        it("shared-durable.and-shared-of-one-name-are-apart", c -> {
            MessageConsumer durable = c.session().createSharedDurableConsumer(c.topic(), c.name);
            MessageConsumer shared = c.session().createSharedConsumer(c.topic(), c.name);
            c.send(c.topic(), "x");
            Case.getsJust(durable, "x");
            Case.getsJust(shared, "x");
        });
    }

    void noLocal() {
        it("no-local.keeps-out-the-own-connections-messages", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.topic(), null, true);
            c.send(c.topic(), "own");
            Case.send(c.connect().createSession(), c.topic(), "other");
            Case.getsJust(consumer, "other");
        });
        it("no-local.not-asked-for", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.topic(), null, false);
            c.send(c.topic(), "own");
            Case.getsJust(consumer, "own");
        });
        it("no-local.of-a-durable-subscription", c -> {
            Connection client = c.connectAs(c.name);
            Session session = client.createSession();
            MessageConsumer consumer = session.createDurableConsumer(c.topic(), "s", null, true);
            Case.send(client.createSession(), c.topic(), "own");
            c.send(c.topic(), "other");
            Case.getsJust(consumer, "other");
        });
        it("no-local.of-the-client-id-also-later", c -> {
            Connection client = c.connectAs(c.name);
            client.createSession().createDurableConsumer(c.topic(), "s", null, true);
            client.close();
            Connection again = c.connectAs(c.name);
            Case.send(again.createSession(), c.topic(), "own");
            c.send(c.topic(), "other");
            Case.getsJust(again.createSession().createDurableConsumer(c.topic(), "s", null, true), "other");
        });
        it("no-local.changed-replaces-the-durable-one", c -> {
            Session session = c.connectAs(c.name).createSession();
            session.createDurableConsumer(c.topic(), "s", null, false).close();
            c.send(c.topic(), "before");
            MessageConsumer consumer = session.createDurableConsumer(c.topic(), "s", null, true);
            c.send(c.topic(), "after");
            Case.getsJust(consumer, "after");
        });
        it("no-local.with-a-selector", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.topic(), "n = 1", true);
            c.sendNumbered(c.topic(), 3);
            Session other = c.connect().createSession();
            TextMessage message = other.createTextMessage("other");
            message.setIntProperty("n", 1);
            other.createProducer(c.topic()).send(message);
            Case.getsJust(consumer, "other");
        });
    }

    void names() {
        it("topic.name-with-its-prefix", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.topic());
            c.send(c.tools().createTopic("topic://" + c.name), "x");
            Case.getsJust(consumer, "x");
        });
        it("subscription.name-of-128-characters", c -> {
            String name = "n".repeat(128);
            Session session = c.connectAs(c.name).createSession();
            session.createDurableConsumer(c.topic(), name).close();
            c.send(c.topic(), "x");
            Case.getsJust(session.createDurableConsumer(c.topic(), name), "x");
        });
        it("subscription.name-of-all-allowed-characters", c -> {
            String name = "aZ09_.-żÄ";
            Session session = c.connectAs(c.name).createSession();
            session.createDurableConsumer(c.topic(), name).close();
            c.send(c.topic(), "x");
            Case.getsJust(session.createDurableConsumer(c.topic(), name), "x");
            Session shared = c.session();
            Case.nothing(shared.createSharedConsumer(c.topic(), c.name + name));
        });
    }
}
