package bascule.xa;

import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.net.URI;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;

/** Forwards connections to a broker, and cuts them when a test asks for it. */
final class Relay implements AutoCloseable {
    private final URI broker;
    private final ServerSocket server = new ServerSocket(0, 50, InetAddress.getLoopbackAddress());
    private final List<Socket> sockets = new CopyOnWriteArrayList<>();
    private volatile boolean cutsInsteadOfAnswer;

    Relay(String broker) throws IOException {
        this.broker = URI.create(broker);
        start(this::accept);
    }

    /** Returns the URL of a client that reconnects at once. */
    String failoverUrl() {
        return "failover:(amqp://127.0.0.1:" + server.getLocalPort() + ")?failover.reconnectDelay=20&failover.maxReconnectDelay=200";
    }

    /** Cuts the open connections; new connections are forwarded. */
    void cut() throws IOException {
        for (Socket socket : sockets) {
            socket.close();
        }
        sockets.clear();
    }

    /** Cuts when the broker next sends something; what the client has sent until then arrives. */
    void cutInsteadOfAnswer() {
        cutsInsteadOfAnswer = true;
    }

    @Override
    public void close() throws IOException {
        server.close();
        cut();
    }

    private void accept() throws IOException {
        while (true) {
            Socket client = server.accept();
            Socket peer = new Socket(broker.getHost(), broker.getPort());
            sockets.add(client);
            sockets.add(peer);
            start(() -> pass(client, peer, false));
            start(() -> pass(peer, client, true));
        }
    }

    private void pass(Socket from, Socket to, boolean answers) throws IOException {
        byte[] buffer = new byte[8192];
        InputStream input = from.getInputStream();
        OutputStream output = to.getOutputStream();
        for (int length = input.read(buffer); length >= 0; length = input.read(buffer)) {
            if (answers && cutsInsteadOfAnswer) {
                cutsInsteadOfAnswer = false;
                cut();
                return;
            }
            output.write(buffer, 0, length);
        }
        from.close();
        to.close();
    }

    private interface Work {
        void run() throws IOException;
    }

    private static void start(Work work) {
        Thread thread = new Thread(() -> {
            try {
                work.run();
            } catch (IOException cut) {
                return; // cut by the test
            }
        });
        thread.setDaemon(true);
        thread.start();
    }
}
