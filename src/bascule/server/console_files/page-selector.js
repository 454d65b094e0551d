// A selector, tried on the messages that wait in a queue.

import { address, h } from "./dom.js";
import { messageList } from "./message-list.js";

export default {
  title: "Selector",
  role: "edit",
  render({ queue = "", selector = "" }) {
    const queueInput = h("input", { name: "queue", value: queue, required: true });
    const text = h("textarea", { name: "selector", rows: 3, spellcheck: "false", required: true }, selector);
    const go = (event) => {
      event.preventDefault();
      const wanted = address("selector", { queue: queueInput.value, selector: text.value });
      if (wanted === location.hash) list?.reload();
      else location.hash = wanted;
    };
    const list = queue && selector ? messageList({ queue, selector, mark: "true" }, [["Matches", (each) => (each.matches ? "yes" : "no")]]) : null;
    list?.reload();
    const element = h("div", {},
      h("p", {}, "Nothing is removed. Each message says whether the selector selects it."),
      h("form", { class: "card form", onsubmit: go }, h("label", {}, "Queue", queueInput), h("label", {}, "Selector", text),
        h("button", { class: "primary" }, "Try")),
      list?.element);
    return { element };
  },
};
