// Actions on chosen messages of a queue.

import { act } from "./api.js";
import { asked, attempt, confirmed, toast } from "./dialogs.js";
import { h } from "./dom.js";
import { DEAD_LETTERS, QUEUES } from "./requests.js";

// `ids` returns the ids of the messages, `done` is called after an action.
export function messageActions(queue, ids, done) {
  const on = (action) => async () => {
    const chosen = [...ids()];
    if (chosen.length === 0) toast("Choose a message first", true);
    else if (await action(chosen.join(" "), chosen.length)) done();
  };
  const move = async (chosen) => {
    const given = await asked("Move messages", [{ name: "to", label: "Target queue", attributes: { required: true } }], "Move");
    return given && attempt(() => act(QUEUES.move, { name: queue, to: given.to, ids: chosen }), (answer) => `moved ${answer.moved}`);
  };
  const back = async (chosen) => attempt(() => act(DEAD_LETTERS.return, { queue, ids: chosen }), (answer) => `returned ${answer.returned}`);
  const remove = async (chosen, count) => (await confirmed("Delete messages", `Deletes ${count} messages. This cannot be undone.`, "Delete"))
    && attempt(() => act(QUEUES.purge, { name: queue, ids: chosen }), (answer) => `deleted ${answer.purged}`);
  return [h("button", { onclick: on(move) }, "Move"), h("button", { onclick: on(back) }, "Return to origin"),
    h("button", { class: "danger", onclick: on(remove) }, "Delete")];
}
