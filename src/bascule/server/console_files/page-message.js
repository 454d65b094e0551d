// One message: headers, properties, body, origin.

import { addressOf, look } from "./api.js";
import { address, facts, h, link, moment } from "./dom.js";
import { messageActions } from "./message-actions.js";
import { bodyView, headersView, typed } from "./message-view.js";
import { MESSAGES } from "./requests.js";

function drawn(message, queue, id) {
  const back = () => { location.hash = address("messages", { queue }); };
  const properties = Object.entries(message.properties).map(([name, each]) => ({ name, ...each }));
  const { origin } = message;
  const body = addressOf(MESSAGES.body, { queue, id });
  return [
    h("div", { class: "bar" }, link("messages", { queue }, h("span", { class: "button" }, "All messages")), messageActions(queue, () => [id], back),
      message.message_id ? link("life", { id: message.message_id }, h("span", { class: "button" }, "What happened")) : null,
      link("send", { queue, id }, h("span", { class: "button" }, "Send again, edited")),
      h("a", { href: body, download: `${message.message_id ?? "message"}.${message.body?.text === undefined ? "bin" : "txt"}` },
        h("span", { class: "button" }, "Download the body"))),
    headersView(message),
    origin.reason ? [h("h2", {}, "Dead letter"), facts([["Cause", origin.reason], ["Original address", origin.address],
      ["Original queue", origin.queue], ["Moved", moment(origin.moved_at_ms)]])] : null,
    h("h2", {}, "Properties"), properties.length ? typed(properties) : h("p", { class: "muted" }, "none"),
    h("h2", {}, `Body (${message.body_kind})`), bodyView(message),
  ].flat(Infinity).filter((each) => each !== null);
}

export default {
  title: "Message",
  role: "edit",
  hidden: true,
  render({ queue = "", id = "" }) {
    const element = h("div");
    look(MESSAGES.show, { queue, id }).then((message) => element.replaceChildren(...drawn(message, queue, id)))
      .catch((error) => element.replaceChildren(h("p", { class: "error" }, error.message)));
    return { element };
  },
};
