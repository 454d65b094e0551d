// Runs in a page: one exchange with a broker by rhea, over the WebSocket of the browser.

const rhea = require("rhea");

// Sends a text and returns what arrives from a queue: {received, delivered: "accepted"}, or {refused: EVENT, condition, description}.
window.exchange = ({ url, user, password, send, receive, text }) =>
  new Promise((resolve) => {
    const found = {};
    const container = rhea.create_container();
    const connection = container.connect({
      connection_details: container.websocket_connect(WebSocket)(url, ["amqp"], {}), username: user, password, reconnect: false,
    });
    const end = (result) => {
      connection.close();
      resolve(result);
    };
    const endIfDone = () => {
      if (("delivered" in found || !send) && ("received" in found || !receive)) end(found);
    };
    const refused = (event) => (context) => {
      const error = (context.receiver ?? context.sender)?.error ?? context.connection?.error ?? context.error ?? {};
      end({ refused: event, condition: error.condition ?? "", description: error.description ?? "" });
    };
    for (const event of ["connection_error", "session_error", "sender_error", "receiver_error", "rejected", "disconnected"]) {
      container.on(event, refused(event));
    }
    container.on("connection_open", () => {
      if (send) connection.open_sender(send);
      if (receive) connection.open_receiver(receive);
    });
    container.once("sendable", (context) => {
      context.sender.send({ body: text, durable: true, application_properties: { from: "browser", number: 7 } });
    });
    container.on("accepted", () => {
      found.delivered = "accepted";
      endIfDone();
    });
    container.on("message", (context) => {
      found.received = context.message.body;
      endIfDone();
    });
  });
