// A page of messages with boxes to choose some of them.

import { look } from "./api.js";
import { h, link, moment, number } from "./dom.js";
import { shortBody } from "./message-view.js";
import { MESSAGES } from "./requests.js";

const COUNT = 50;
const LONG = new Set(["Message id", "Body"]);

// `parameters` are those of /messages. `extra` are more columns: [title, cell(message)].
export function messageList(parameters, extra = []) {
  const chosen = new Set();
  const body = h("tbody");
  const info = h("p", { class: "muted", role: "status" });
  const more = h("button", { hidden: true, onclick: () => load() }, "More");
  const every = h("input", { type: "checkbox", "aria-label": "Choose all that are shown" });
  const titles = ["Message id", "State", "Sent", "Kind", "Body", "Size", ...extra.map(([title]) => title)];
  let after = "";
  let shown = 0;
  let lookedAt = 0;

  every.addEventListener("change", () => {
    for (const box of body.querySelectorAll("input")) {
      if (box.checked !== every.checked) box.click();
    }
  });

  function row(message) {
    const box = h("input", { type: "checkbox", "aria-label": `Choose ${message.message_id ?? message.id}`,
      onchange: (event) => { if (event.target.checked) chosen.add(message.id); else chosen.delete(message.id); } });
    const cells = [link("message", { queue: parameters.queue, id: message.id }, message.message_id ?? "(none)"), message.state,
      moment(message.timestamp_ms), message.body_kind, shortBody(message), number(message.bytes), ...extra.map(([, cell]) => cell(message))];
    return h("tr", { class: message.matches ? null : "unmatched" }, h("td", {}, box),
      cells.map((cell, index) => h("td", { class: LONG.has(titles[index]) ? "long" : null, "data-title": titles[index] }, cell)));
  }

  async function load(again = false) {
    if (again) {
      after = "";
      shown = lookedAt = 0;
      chosen.clear();
      every.checked = false;
    }
    try {
      const page = await look(MESSAGES.list, { ...parameters, count: COUNT, after });
      const rows = page.messages.map(row);
      if (again) body.replaceChildren(...rows);
      else body.append(...rows);
      after = page.next;
      shown += page.messages.length;
      lookedAt += page.looked_at;
      more.hidden = after === "";
      info.className = "muted";
      info.textContent = `${number(shown)} shown, ${number(lookedAt)} looked at${after ? "; there are more" : ""}`;
      return page;
    } catch (error) {
      info.className = "error";
      info.textContent = error.message;
      return null;
    }
  }

  const element = h("div", {}, h("div", { class: "scroll" }, h("table", { class: "stacked messages" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, every), titles.map((each) => h("th", { scope: "col" }, each)))), body)), info, more);
  return { element, chosen, reload: () => load(true) };
}
