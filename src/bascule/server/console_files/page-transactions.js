// Branches of distributed transactions in doubt, with what each end would do.

import { act, may } from "./api.js";
import { attempt, confirmed } from "./dialogs.js";
import { bytes, h, moment, number } from "./dom.js";
import { BRANCHES, LISTS } from "./requests.js";
import { pagedTable } from "./table.js";

const ENDS = {
  commit: (row) => `${number(row.sent)} messages become visible, ${number(row.received)} received messages are removed`,
  rollback: (row) => `${number(row.sent)} messages are discarded, ${number(row.received)} received messages are redelivered`,
  forget: () => "the broker forgets the outcome that an administrator chose; its manager no longer gets it",
};

export default {
  title: "Transactions",
  render(parameters) {
    const end = (row, action) => async () => {
      const text = `${ENDS[action](row)}. Its manager does not decide any more: other resources may have the other outcome.`;
      if (!(await confirmed(`${action} ${row.xid}`, text, action, action))) return;
      await attempt(() => act(BRANCHES[action], { xid: row.xid }), () => `${action}: ${row.xid}`);
      table.reload();
    };
    const actions = (row) => (row.state === "prepared" ? ["commit", "rollback"] : ["forget"])
      .map((action) => h("button", { class: "danger", title: ENDS[action](row), onclick: end(row, action) }, action));
    const table = pagedTable(LISTS.branches, [
      { key: "xid", title: "Branch", long: true },
      { key: "state", title: "State" },
      { key: "since_ms", title: "Since", cell: (row) => moment(row.since_ms) },
      { key: "user", title: "Owner" },
      { key: "bytes", title: "Size", numeric: true, cell: (row) => bytes(row.bytes) },
      { title: "Commit would", cell: (row) => (row.state === "prepared" ? ENDS.commit(row) : "") },
      { title: "Rollback would", cell: (row) => (row.state === "prepared" ? ENDS.rollback(row) : "") },
      { title: "", cell: (row) => (may("manage") ? actions(row) : "") },
    ], parameters, { sort: "since_ms" });
    const element = h("div", {}, h("p", {}, "A prepared branch waits for the decision of its manager. End it here only if the manager is gone; ",
      h("code", {}, "bascule xa"), " asks the manager's log first."), table.element);
    return { element, end: table.end };
  },
};
