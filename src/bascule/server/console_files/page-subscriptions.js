// Subscriptions of topics.

import { link, moment, queueReference } from "./dom.js";
import { LISTS } from "./requests.js";
import { pagedTable } from "./table.js";

export default {
  title: "Subscriptions",
  render(parameters) {
    return pagedTable(LISTS.subscriptions, [
      { key: "name", title: "Name", long: true, cell: (row) => link("queue", { name: queueReference(row.name, true) }, row.name) },
      { key: "topic", title: "Topic", long: true },
      { title: "Selector", long: true, cell: (row) => row.selector },
      { title: "Durable", cell: (row) => (row.durable ? "yes" : "no") },
      { key: "messages", title: "Waiting", numeric: true },
      { key: "delivering", title: "In delivery", numeric: true },
      { key: "consumers", title: "Consumers", numeric: true },
      { key: "unused_since_ms", title: "Unused since", cell: (row) => moment(row.unused_since_ms) },
    ], parameters);
  },
};
