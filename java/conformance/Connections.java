import jakarta.jms.*;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.qpid.jms.JmsConnectionFactory;

/** Connections and sessions: identity, security, starting and stopping, closing, temporary destinations, failover addresses. */
final class Connections extends Suite {
    Connections() {
        identity();
        security();
        starting();
        closing();
        temporary();
        sessions();
        failover();
    }

    void identity() {
        it("connection.client-id-is-told", c -> Check.equal(c.name, c.connectAs(c.name).getClientID()));
        it("connection.client-id-is-one-connections-alone", c -> {
            Connection first = c.connectAs(c.name);
            Check.fails(InvalidClientIDException.class, () -> c.connectAs(c.name));
            Case.send(first.createSession(), c.queue(), "x"); // the first connection still works
            Case.getsJust(c.session().createConsumer(c.queue()), "x");
        });
        it("connection.client-id-is-free-again-after-the-close", c -> {
            c.connectAs(c.name).close();
            Check.equal(c.name, c.connectAs(c.name).getClientID());
        });
        it("connection.client-id-by-the-url", c -> {
            Connection first = c.connect("jms.clientID=" + c.name);
            Check.equal(c.name, first.getClientID());
            Check.fails(InvalidClientIDException.class, () -> c.connect("jms.clientID=" + c.name));
        });
        it("connection.client-id-by-the-url-cannot-be-changed", c -> {
            Connection connection = c.keep(c.factory("jms.clientID=" + c.name).createConnection());
            Check.fails(jakarta.jms.IllegalStateException.class, () -> connection.setClientID("other"));
        });
        it("connection.client-id-set-too-late", c -> {
            Connection connection = c.connect();
            connection.createSession();
            Check.fails(jakarta.jms.IllegalStateException.class, () -> connection.setClientID(c.name));
        });
        it("connection.client-id-empty", c -> {
            Connection connection = c.keep(c.factory().createConnection());
            Check.fails(InvalidClientIDException.class, () -> connection.setClientID(""));
        });
        it("connection.factory-and-destinations-by-jndi", c -> {
            java.util.Hashtable<String, String> environment = new java.util.Hashtable<>();
            environment.put("java.naming.factory.initial", "org.apache.qpid.jms.jndi.JmsInitialContextFactory");
            environment.put("connectionfactory.broker", c.url);
            environment.put("queue.q", c.name);
            environment.put("topic.t", c.name);
            javax.naming.Context context = new javax.naming.InitialContext(environment);
            Connection connection = c.keep(((ConnectionFactory) context.lookup("broker")).createConnection());
            connection.start();
            Case.send(connection.createSession(), (Destination) context.lookup("q"), "x");
            Case.getsJust(c.session().createConsumer(c.queue()), "x");
            Check.equal(c.topic(), context.lookup("t"));
        });
        it("connection.metadata", c -> {
            ConnectionMetaData metadata = c.connection().getMetaData();
            Check.that(metadata.getJMSMajorVersion() >= 2, "JMS 2 or later");
            Check.that(!metadata.getJMSProviderName().isEmpty() && !metadata.getProviderVersion().isEmpty(), "a provider with a version");
            Check.that(metadata.getJMSVersion().startsWith(metadata.getJMSMajorVersion() + "." + metadata.getJMSMinorVersion()),
                    "version and parts agree");
        });
        it("connection.many-at-once", c -> {
            List<Connection> connections = new ArrayList<>();
            for (int i = 0; i < 20; i++) connections.add(c.connect());
            for (int i = 0; i < 20; i++) Case.send(connections.get(i).createSession(), c.queue(), "" + i);
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 20));
        });
        it("connection.one-after-another", c -> {
            for (int i = 0; i < 20; i++) {
                try (Connection connection = c.connect()) {
                    Case.send(connection.createSession(), c.queue(), "" + i);
                }
            }
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 20));
        });
        it("connection.idle-is-kept-by-heartbeats", c -> {
            Connection connection = c.connect("amqp.idleTimeout=6000"); // a shorter time would measure how busy the machine is
            Delivery.pause(8000);
            Case.send(connection.createSession(), c.queue(), "x");
            Case.getsJust(c.session().createConsumer(c.queue()), "x");
        });
        it("connection.small-frames", c -> {
            Session session = c.connect("amqp.maxFrameSize=1024").createSession();
            String text = "0123456789".repeat(2000);
            Case.send(session, c.queue(), text);
            Case.getsJust(session.createConsumer(c.queue()), text);
        });
    }

    void security() {
        it("security.user-with-the-password", c -> {
            Connection connection = c.keep(new JmsConnectionFactory(c.url).createConnection(c.user(), c.user()));
            connection.start();
        });
        it("security.wrong-password", c -> refused(c, c.user(), "wrong"));
        it("security.unknown-user", c -> refused(c, "nobody", "wrong"));
        it("security.anonymous-where-allowed", c -> c.keep(new JmsConnectionFactory(c.url).createConnection()).start());
        it("security.plain-asked-for", c -> c.connect("amqp.saslMechanisms=PLAIN"));
        it("security.mechanism-that-is-not-offered", c -> Check.fails(JMSException.class, () -> c.connect("amqp.saslMechanisms=XOAUTH2")));
    }

    static void refused(Case c, String user, String password) {
        Check.fails(JMSSecurityException.class, () -> {
            try (Connection connection = new JmsConnectionFactory(c.url).createConnection(user, password)) {
                connection.start();
            }
        });
    }

    void starting() {
        it("start.nothing-is-delivered-before", c -> {
            Connection stopped = c.keep(c.factory().createConnection());
            MessageConsumer consumer = stopped.createSession().createConsumer(c.queue());
            c.send(c.queue(), "x");
            Case.silence(consumer);
            stopped.start();
            Case.gets(consumer, "x");
        });
        it("start.stop-holds-up-and-start-goes-on", c -> {
            Connection connection = c.connect();
            MessageConsumer consumer = connection.createSession().createConsumer(c.queue());
            c.send(c.queue(), "0");
            Case.gets(consumer, "0");
            connection.stop();
            c.send(c.queue(), "1");
            Case.silence(consumer);
            connection.start();
            Case.gets(consumer, "1");
        });
        it("start.stop-holds-up-listeners", c -> {
            Connection connection = c.connect();
            List<String> got = Collections.synchronizedList(new ArrayList<>());
            Listeners.listen(connection.createSession().createConsumer(c.queue()), got);
            c.send(c.queue(), "0");
            Case.until("a message", () -> got.size() == 1);
            connection.stop();
            c.send(c.queue(), "1");
            Delivery.pause(Case.SILENCE_MS);
            Check.equal(List.of("0"), got);
            connection.start();
            Case.until("the second message", () -> got.size() == 2);
        });
        it("start.twice-and-stop-twice", c -> {
            Connection connection = c.connect();
            connection.start();
            connection.stop();
            connection.stop();
            connection.start();
            c.send(c.queue(), "x");
            Case.gets(connection.createSession().createConsumer(c.queue()), "x");
        });
        it("start.stop-waits-for-a-listener-that-runs", c -> {
            Connection connection = c.connect();
            CountDownLatch running = new CountDownLatch(1);
            boolean[] ended = new boolean[1];
            connection.createSession().createConsumer(c.queue()).setMessageListener(message -> {
                running.countDown();
                try {
                    Delivery.pause(150);
                } catch (InterruptedException ignored) {
                    Thread.currentThread().interrupt();
                }
                ended[0] = true;
            });
            c.send(c.queue(), "x");
            Check.that(running.await(Case.WAIT_MS, TimeUnit.MILLISECONDS), "the listener runs");
            connection.stop();
            Check.that(ended[0], "the listener had returned before stop did");
        });
    }

    void closing() {
        it("close.twice", c -> {
            Connection connection = c.connect();
            Session session = connection.createSession();
            session.close();
            session.close();
            connection.close();
            connection.close();
        });
        it("close.connection-then-nothing-works", c -> {
            Connection connection = c.connect();
            Session session = connection.createSession();
            MessageProducer producer = session.createProducer(c.queue());
            MessageConsumer consumer = session.createConsumer(c.queue());
            connection.close();
            Check.fails(jakarta.jms.IllegalStateException.class, connection::createSession);
            Check.fails(jakarta.jms.IllegalStateException.class, connection::start);
            Check.fails(jakarta.jms.IllegalStateException.class, session::createMessage);
            Check.fails(jakarta.jms.IllegalStateException.class, () -> producer.send(c.text("x")));
            Check.fails(jakarta.jms.IllegalStateException.class, consumer::receive);
            producer.close();
            consumer.close();
        });
        it("close.session-then-nothing-of-it-works", c -> {
            Session session = c.session();
            MessageConsumer consumer = session.createConsumer(c.queue());
            session.close();
            Check.fails(jakarta.jms.IllegalStateException.class, session::createTextMessage);
            Check.fails(jakarta.jms.IllegalStateException.class, consumer::receiveNoWait);
        });
        it("close.messages-stay-usable", c -> {
            Connection connection = c.connect();
            c.send(c.queue(), "x");
            Message got = Case.one(connection.createSession().createConsumer(c.queue()));
            connection.close();
            Check.equal("x", Case.textOf(got));
        });
        it("close.ends-a-receive-that-waits", c -> {
            Connection connection = c.connect();
            MessageConsumer consumer = connection.createSession().createConsumer(c.queue());
            AtomicReference<Object> got = new AtomicReference<>("still waiting");
            Thread receiver = new Thread(() -> {
                try {
                    got.set(consumer.receive());
                } catch (JMSException error) {
                    got.set(error);
                }
            });
            receiver.start();
            Case.until("the receiver to wait", () -> receiver.getState() == Thread.State.WAITING
                    || receiver.getState() == Thread.State.TIMED_WAITING);
            connection.close();
            receiver.join(Case.WAIT_MS);
            Check.none(got.get());
        });
        it("close.does-not-acknowledge", c -> {
            c.send(c.queue(), "x");
            Connection connection = c.connect();
            Case.one(connection.createSession(Session.CLIENT_ACKNOWLEDGE).createConsumer(c.queue()));
            connection.close();
            Case.gets(c.session().createConsumer(c.queue()), "x");
        });
        it("close.of-a-session-from-another-thread", c -> {
            Session session = c.session();
            MessageConsumer consumer = session.createConsumer(c.queue());
            Thread closer = new Thread(() -> {
                try {
                    Delivery.pause(50);
                    session.close();
                } catch (Exception error) {
                    throw new java.lang.IllegalStateException(error);
                }
            });
            closer.start();
            Check.none(consumer.receive());
            closer.join();
        });
        it("close.of-a-consumer-waits-for-its-listener", c -> {
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            CountDownLatch running = new CountDownLatch(1);
            boolean[] ended = new boolean[1];
            consumer.setMessageListener(message -> {
                running.countDown();
                try {
                    Delivery.pause(150);
                } catch (InterruptedException ignored) {
                    Thread.currentThread().interrupt();
                }
                ended[0] = true;
            });
            c.send(c.queue(), "x");
            Check.that(running.await(Case.WAIT_MS, TimeUnit.MILLISECONDS), "the listener runs");
            consumer.close();
            Check.that(ended[0], "the listener had returned before close did");
        });
        it("close.gives-queue-and-subscription-names-free", c -> {
            for (int i = 0; i < 5; i++) {
                Connection connection = c.connectAs(c.name);
                connection.createSession().createDurableConsumer(c.topic(), "s");
                connection.close();
            }
        });
    }

    void temporary() {
        it("temporary.queue-serves-its-connection", c -> {
            TemporaryQueue queue = c.session().createTemporaryQueue();
            c.send(queue, "x");
            Case.getsJust(c.session().createConsumer(queue), "x");
        });
        it("temporary.topic-serves-its-connection", c -> {
            TemporaryTopic topic = c.session().createTemporaryTopic();
            MessageConsumer one = c.session().createConsumer(topic), two = c.session().createConsumer(topic);
            c.send(topic, "x");
            Case.getsJust(one, "x");
            Case.getsJust(two, "x");
        });
        it("temporary.names-differ", c -> {
            Session session = c.session();
            Check.that(!session.createTemporaryQueue().getQueueName().equals(session.createTemporaryQueue().getQueueName()), "two names");
        });
        it("temporary.outlives-the-session-that-made-it", c -> {
            Session session = c.session();
            TemporaryQueue queue = session.createTemporaryQueue();
            session.close();
            c.send(queue, "x");
            Case.getsJust(c.session().createConsumer(queue), "x");
        });
        it("temporary.only-its-connection-may-consume", c -> {
            TemporaryQueue queue = c.session().createTemporaryQueue();
            Session other = c.connect().createSession();
            Check.fails(JMSException.class, () -> other.createConsumer(queue));
        });
        it("temporary.only-its-connection-may-consume-also-by-name", c -> {
            String name = c.session().createTemporaryQueue().getQueueName();
            Session other = c.connect().createSession();
            Check.fails(JMSException.class, () -> other.createConsumer(other.createQueue(name)));
        });
        it("temporary.others-may-send", c -> {
            TemporaryQueue queue = c.session().createTemporaryQueue();
            Case.send(c.connect().createSession(), queue, "x");
            Case.getsJust(c.session().createConsumer(queue), "x");
        });
        it("temporary.deleted-queue-cannot-be-used", c -> {
            TemporaryQueue queue = c.session().createTemporaryQueue();
            queue.delete();
            Check.fails(JMSException.class, () -> c.session().createConsumer(queue));
            Check.fails(JMSException.class, () -> c.send(queue, "x"));
        });
        it("temporary.delete-in-use-is-refused", c -> {
            TemporaryQueue queue = c.session().createTemporaryQueue();
            MessageConsumer consumer = c.session().createConsumer(queue);
            Check.fails(JMSException.class, queue::delete);
            c.send(queue, "x");
            Case.gets(consumer, "x");
            consumer.close();
            queue.delete();
        });
        it("temporary.gone-with-its-connection", c -> {
            Connection owner = c.connect();
            TemporaryQueue queue = owner.createSession().createTemporaryQueue();
            Case.send(c.connect().createSession(), queue, "lost");
            owner.close();
            Check.fails(JMSException.class, () -> {
                Session session = c.connect().createSession();
                session.createProducer(queue).send(session.createTextMessage("x"));
            });
        });
        it("temporary.anonymous-send-after-it-is-gone-fails", c -> {
            Connection owner = c.connect();
            TemporaryQueue queue = owner.createSession().createTemporaryQueue();
            owner.close();
            Session session = c.connect().createSession();
            Check.fails(JMSException.class, () -> session.createProducer(null).send(queue, session.createTextMessage("x")));
        });
        it("temporary.many", c -> {
            Session session = c.session();
            List<TemporaryQueue> queues = new ArrayList<>();
            for (int i = 0; i < 40; i++) queues.add(session.createTemporaryQueue());
            for (TemporaryQueue each : queues) c.send(each, each.getQueueName());
            for (TemporaryQueue each : queues) Case.getsJust(session.createConsumer(each), each.getQueueName());
            for (TemporaryQueue each : queues.subList(30, 40)) Check.fails(JMSException.class, each::delete); // it still has a consumer
        });
        it("temporary.browser", c -> {
            TemporaryQueue queue = c.session().createTemporaryQueue();
            c.send(queue, "x");
            Check.equal(List.of("x"), Browsers.browse(c.session().createBrowser(queue)));
        });
        it("temporary.transacted", c -> {
            Session session = c.session(Session.SESSION_TRANSACTED);
            TemporaryQueue queue = session.createTemporaryQueue();
            Case.send(session, queue, "x");
            session.commit();
            MessageConsumer consumer = session.createConsumer(queue);
            Case.gets(consumer, "x");
            session.rollback();
            Case.gets(consumer, "x");
            session.commit();
        });
    }

    void sessions() {
        it("session.many-of-a-connection", c -> {
            List<Session> sessions = new ArrayList<>();
            for (int i = 0; i < 100; i++) sessions.add(c.session());
            for (int i = 0; i < 100; i++) Case.send(sessions.get(i), c.queue(), "" + i);
            Case.getsJust(c.session().createConsumer(c.queue()), Case.numbers(0, 100));
            for (Session each : sessions) each.close();
        });
        it("session.opened-and-closed-again-and-again", c -> {
            for (int i = 0; i < 200; i++) c.session().close();
        });
        it("session.producers-and-consumers-opened-and-closed", c -> {
            Session session = c.session();
            for (int i = 0; i < 50; i++) {
                Case.send(session, c.queue(), "" + i);
                try (MessageConsumer consumer = session.createConsumer(c.queue())) {
                    Case.gets(consumer, "" + i);
                }
            }
        });
        it("session.null-destination", c -> {
            Check.fails(InvalidDestinationException.class, () -> c.session().createConsumer(null));
            Check.fails(InvalidDestinationException.class, () -> c.session().createBrowser(null));
            Check.fails(InvalidDestinationException.class, () -> c.session().createDurableConsumer(null, "s"));
        });
        it("session.unknown-acknowledge-mode", c -> Check.fails(JMSException.class, () -> c.connection().createSession(99)));
        it("session.used-by-two-threads-in-turn", c -> {
            Session session = c.session();
            Thread sender = new Thread(() -> {
                try {
                    Case.send(session, c.queue(), "x");
                } catch (JMSException error) {
                    throw new java.lang.IllegalStateException(error);
                }
            });
            c.queue();
            sender.start();
            sender.join();
            Case.getsJust(session.createConsumer(c.queue()), "x");
        });
        it("session.threads-of-a-connection-send-at-once", c -> {
            c.queue();
            List<Thread> threads = new ArrayList<>();
            for (int i = 0; i < 5; i++) {
                Thread thread = new Thread(() -> {
                    try {
                        Case.send(c.session(), c.queue(), Case.numbers(0, 20));
                    } catch (JMSException error) {
                        throw new java.lang.IllegalStateException(error);
                    }
                });
                thread.start();
                threads.add(thread);
            }
            for (Thread each : threads) each.join();
            MessageConsumer consumer = c.session().createConsumer(c.queue());
            for (int i = 0; i < 100; i++) Case.one(consumer);
            Case.nothing(consumer);
        });
    }

    void failover() {
        it("failover.first-address-that-answers", c -> {
            Session session = failing(c, "amqp://127.0.0.1:1," + c.url, "").createSession();
            Case.send(session, c.queue(), "x");
            Case.getsJust(session.createConsumer(c.queue()), "x");
        });
        it("failover.options-of-the-client", c -> {
            Connection connection = failing(c, c.url, "?jms.clientID=" + c.name + "&failover.reconnectDelay=20");
            Check.equal(c.name, connection.getClientID());
        });
        it("failover.gives-up-after-its-attempts", c ->
                Check.fails(JMSException.class, () ->
                        failing(c, "amqp://127.0.0.1:1", "?failover.startupMaxReconnectAttempts=1&failover.maxReconnectAttempts=1")));
        it("failover.wrong-password-is-told-at-once", c -> Check.fails(JMSSecurityException.class, () -> {
            JmsConnectionFactory factory = new JmsConnectionFactory("failover:(" + c.url + ")?failover.maxReconnectAttempts=3");
            try (Connection connection = factory.createConnection(c.user(), "wrong")) {
                connection.start();
            }
        }));
        it("connection.refused-address", c -> Check.fails(JMSException.class, () -> {
            try (Connection connection = new JmsConnectionFactory("amqp://127.0.0.1:1").createConnection()) {
                connection.start();
            }
        }));
        it("connection.exception-listener", c -> {
            Connection connection = c.connect();
            ExceptionListener listener = error -> {};
            Check.none(connection.getExceptionListener());
            connection.setExceptionListener(listener);
            Check.that(connection.getExceptionListener() == listener, "the listener that was set");
        });
    }

    static Connection failing(Case c, String addresses, String options) throws JMSException {
        Connection connection = c.keep(new JmsConnectionFactory("failover:(" + addresses + ")" + options)
                .createConnection(c.user(), c.user()));
        connection.start();
        return connection;
    }
}
