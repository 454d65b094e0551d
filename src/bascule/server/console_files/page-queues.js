// All queues, and the queues of subscriptions.

import { act, may } from "./api.js";
import { asked, attempt } from "./dialogs.js";
import { bytes, h, link, queueReference } from "./dom.js";
import { LISTS, QUEUES } from "./requests.js";
import { pagedTable } from "./table.js";

export default {
  title: "Queues",
  render(parameters) {
    const create = async () => {
      const given = await asked("Create a queue", [{ name: "name", label: "Name", attributes: { required: true } }], "Create");
      if (given) await attempt(() => act(QUEUES.create, given), (answer) => `created ${answer.created}`);
      table.reload();
    };
    const table = pagedTable(LISTS.queues, [
      { key: "name", title: "Name", long: true, cell: (row) => link("queue", { name: queueReference(row.name, row.routing === "multicast") }, row.name) },
      { key: "address", title: "Address", long: true },
      { key: "routing", title: "Routing" },
      { key: "messages", title: "Waiting", numeric: true },
      { key: "delivering", title: "In delivery", numeric: true },
      { key: "delayed", title: "Delayed", numeric: true },
      { key: "bytes", title: "Size", numeric: true, cell: (row) => bytes(row.bytes) },
      { key: "consumers", title: "Consumers", numeric: true },
    ], parameters, { buttons: may("edit") ? h("button", { onclick: create }, "Create") : null });
    return table;
  },
};
