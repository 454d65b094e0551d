// Connections of clients.

import { link } from "./dom.js";
import { LISTS } from "./requests.js";
import { pagedTable } from "./table.js";

export default {
  title: "Connections",
  render(parameters) {
    return pagedTable(LISTS.connections, [
      { key: "id", title: "Address", cell: (row) => link("connection", { id: row.id }, row.id) },
      { key: "client_id", title: "Client id", long: true },
      { key: "user", title: "User", long: true },
      { key: "mechanism", title: "Log-in" },
      { key: "producers", title: "Producers", numeric: true },
      { key: "consumers", title: "Consumers", numeric: true },
      { key: "transactions", title: "Transactions", numeric: true },
    ], parameters);
  },
};
