// Messages that could not be delivered, with their cause.

import { act, look } from "./api.js";
import { attempt, confirmed } from "./dialogs.js";
import { h, link, moment, number } from "./dom.js";
import { live } from "./live.js";
import { messageActions } from "./message-actions.js";
import { messageList } from "./message-list.js";
import { DEAD_LETTERS } from "./requests.js";
import { grid } from "./table.js";

const COUNTED = 1000;

// The causes of the first dead letters, with their numbers.
async function causes(queue) {
  const letters = await look(DEAD_LETTERS.list, { queue, count: COUNTED });
  const counts = new Map();
  for (const each of letters) {
    const key = JSON.stringify([each.reason ?? "no reason given", each.queue ?? each.address ?? ""]);
    const known = counts.get(key) ?? { count: 0, last: 0, deliveries: 0 };
    counts.set(key, { count: known.count + 1, last: Math.max(known.last, each.moved_at_ms ?? 0), deliveries: each.deliveries ?? "" });
  }
  return { counted: letters.length, rows: [...counts].sort((a, b) => b[1].count - a[1].count) };
}

function table({ counted, rows }) {
  if (!counted) return [h("p", { class: "muted" }, "There are no dead letters.")];
  const titles = ["Cause", "From", "Messages", "Deliveries", "Last moved"];
  const cells = rows.map(([key, each]) => {
    const [reason, from] = JSON.parse(key);
    return [reason, from ? link("queue", { name: from }, from) : "", number(each.count), each.deliveries, moment(each.last)];
  });
  return [grid(titles, cells), h("p", { class: "muted" }, counted === COUNTED ? `the first ${number(COUNTED)} messages are counted` : "")];
}

export default {
  title: "Dead letters",
  role: "edit",
  render({ queue = live.now?.dead_letter_address ?? "DLQ" }) {
    const summary = h("div");
    const list = messageList({ queue });
    const load = () => {
      list.reload();
      causes(queue).then((found) => summary.replaceChildren(...table(found)))
        .catch((error) => summary.replaceChildren(h("p", { class: "error" }, error.message)));
    };
    const all = async () => {
      if (!(await confirmed("Return all dead letters", `Returns all messages of ${queue} to the queues they came from.`, "Return all"))) return;
      await attempt(() => act(DEAD_LETTERS.return, { queue }), (answer) => `returned ${answer.returned}`);
      load();
    };
    load();
    const element = h("div", {}, h("p", {}, "Queue ", link("queue", { name: queue }, queue)), summary,
      h("div", { class: "bar" }, h("button", { onclick: all }, "Return all"), messageActions(queue, () => list.chosen, load)), list.element);
    return { element };
  },
};
