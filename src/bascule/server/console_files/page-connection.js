// One connection with its links.

import { act, look, may } from "./api.js";
import { attempt, confirmed } from "./dialogs.js";
import { address, facts, h, link, number, queueReference } from "./dom.js";
import { CONNECTIONS } from "./requests.js";
import { grid } from "./table.js";

const TITLES = ["Role", "Address", "Queue", "Selector", "Unsettled", "Credit"];

function row(each) {
  return [each.role, each.address, each.queue ? link("queue", { name: queueReference(each.queue, each.queue !== each.address) }, each.queue) : "", each.selector,
    number(each.unsettled), number(each.credit)];
}

export default {
  title: "Connection",
  hidden: true,
  render({ id = "" }) {
    const element = h("div", {});
    const close = async () => {
      if (!(await confirmed(`Close ${id}`, "The client may connect again. Its unsettled messages are redelivered.", "Close"))) return;
      if (await attempt(() => act(CONNECTIONS.close, { id }), (answer) => `closed ${answer.closed}`)) location.hash = address("connections");
    };
    look(CONNECTIONS.links, { id }).then((found) => element.replaceChildren(
      may("manage") ? h("div", { class: "bar" }, h("button", { class: "danger", onclick: close }, "Close")) : "",
      facts([["Address", found.id], ["Client id", found.client_id], ["User", found.user], ["Log-in", found.mechanism],
        ["Producers", number(found.producers)], ["Consumers", number(found.consumers)], ["Transactions", number(found.transactions)]]),
      h("h2", {}, "Links"), grid(TITLES, found.links.map(row)),
    )).catch((error) => element.replaceChildren(h("p", { class: "error" }, error.message)));
    return { element };
  },
};
