// Topics with subscriptions.

import { link } from "./dom.js";
import { LISTS } from "./requests.js";
import { pagedTable } from "./table.js";

export default {
  title: "Topics",
  render(parameters) {
    return pagedTable(LISTS.topics, [
      { key: "name", title: "Name", long: true, cell: (row) => link("subscriptions", { search: row.name }, row.name) },
      { key: "subscriptions", title: "Subscriptions", numeric: true },
      { key: "messages", title: "Waiting", numeric: true },
      { key: "consumers", title: "Consumers", numeric: true },
    ], parameters);
  },
};
