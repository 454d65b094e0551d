// The messages of a queue: a look that removes nothing, with a search by selector and by text.

import { address, h } from "./dom.js";
import { messageActions } from "./message-actions.js";
import { messageList } from "./message-list.js";

export default {
  title: "Messages",
  role: "edit",
  render({ queue = "", selector = "", text = "" }) {
    const queueInput = h("input", { name: "queue", value: queue, required: true });
    const selectorInput = h("input", { name: "selector", value: selector, placeholder: "JMSType = 'order' AND amount > 10" });
    const textInput = h("input", { name: "text", value: text, maxlength: 200 });
    const go = (event) => {
      event.preventDefault();
      const wanted = address("messages", { queue: queueInput.value, selector: selectorInput.value, text: textInput.value });
      if (wanted === location.hash) list?.reload();
      else location.hash = wanted;
    };
    const list = queue ? messageList({ queue, selector, text }) : null;
    list?.reload();
    const element = h("div", {},
      h("form", { class: "bar wide", onsubmit: go }, h("label", {}, "Queue", queueInput), h("label", {}, "Selector", selectorInput),
        h("label", {}, "Text in the message", textInput), h("button", { class: "primary" }, "Show")),
      list ? [h("div", { class: "bar" }, messageActions(queue, () => list.chosen, list.reload)), list.element] : null);
    return { element };
  },
};
