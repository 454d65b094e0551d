// One queue: state, consumers, settings of its address, and actions.

import { act, look, may } from "./api.js";
import { asked, attempt, confirmed } from "./dialogs.js";
import { address, bytes, facts, h, link, number, queueReference } from "./dom.js";
import { QUEUES } from "./requests.js";
import { grid } from "./table.js";

const REFRESH_MS = 3000;

function actions(queue, reload) {
  const { name } = queue;
  const subscription = queue.routing === "multicast";
  const reference = queueReference(name, subscription);
  const count = number(queue.messages + queue.delayed);
  const purge = async () => {
    if (!(await confirmed(`Purge ${name}`, `Deletes ${count} messages. This cannot be undone.`, "Purge", name))) return;
    await attempt(() => act(QUEUES.purge, { name: reference }), (answer) => `purged ${answer.purged} messages`);
    reload();
  };
  const move = async () => {
    const given = await asked(`Move the messages of ${name}`,
      [{ name: "to", label: "Target queue", attributes: { required: true } }, { name: "selector", label: "Selector, empty for all" }], "Move");
    if (!given) return;
    await attempt(() => act(QUEUES.move, { name: reference, ...given }), (answer) => `moved ${answer.moved} messages`);
    reload();
  };
  const remove = async () => {
    if (!(await confirmed(`Delete ${name}`, `Deletes the queue and its ${count} messages. This cannot be undone.`, "Delete", name))) return;
    const request = subscription ? QUEUES.deleteSubscription : QUEUES.delete;
    if (await attempt(() => act(request, { name: reference, force: true }), () => `deleted ${name}`)) location.hash = address("queues");
  };
  return h("div", { class: "bar" },
    may("edit") ? [
      link("messages", { queue: reference }, h("span", { class: "button" }, "Messages")),
      link("send", { to: queue.address, topic: subscription ? "true" : "" }, h("span", { class: "button" }, "Send")),
      h("button", { onclick: move }, "Move"), h("button", { class: "danger", onclick: purge }, "Purge"),
      h("button", { class: "danger", onclick: remove }, "Delete"),
    ] : null);
}

function drawn(queue) {
  return [
    facts([["Name", queue.name], ["Address", queue.address], ["Routing", queue.routing], ["Waiting", number(queue.messages)],
      ["In delivery", number(queue.delivering)], ["Delayed", number(queue.delayed)], ["Size", bytes(queue.bytes)],
      ["Durable", queue.durable ? "yes" : "no"], ["Made by use", queue.auto_created ? "yes" : "no"], ["Selector", queue.selector],
      ["Full", queue.full ? "yes" : ""]]),
    h("h2", {}, "Consumers"),
    queue.consumer_list.length ? grid(["Connection", "Client id", "Selector", "Unsettled", "Credit"], queue.consumer_list.slice(0, 200).map((each) => [
      link("connection", { id: each.connection }, each.connection), each.client_id, each.selector, number(each.unsettled), number(each.credit),
    ])) : h("p", { class: "muted" }, "none"),
    h("h2", {}, "Settings of its address (times in ms)"),
    facts(Object.entries(queue.settings).map(([name, value]) => [name, String(value)])),
  ];
}

export default {
  title: "Queue",
  hidden: true,
  render({ name = "" }) {
    const head = h("div");
    const body = h("div");
    const element = h("div", {}, head, body);
    let timer = null;
    let over = false;
    let bar = "";
    const load = async () => {
      clearTimeout(timer);
      try {
        const queue = await look(QUEUES.show, { name });
        if (over) return;
        const state = JSON.stringify([queue.messages, queue.delayed]);
        if (state !== bar) head.replaceChildren(actions(queue, load));
        bar = state;
        body.replaceChildren(...drawn(queue));
      } catch (error) {
        body.replaceChildren(h("p", { class: "error" }, error.message));
      }
      if (!over) timer = setTimeout(load, REFRESH_MS);
    };
    load();
    return { element, end: () => { over = true; clearTimeout(timer); } };
  },
};
