// Messages to the user, and questions before an action.

import { h } from "./dom.js";

const TOAST_MS = 8000;

export function toast(text, failed = false) {
  const shown = h("div", { class: failed ? "toast failed" : "toast", role: failed ? "alert" : "status" },
    h("span", {}, text), h("button", { "aria-label": "Close", onclick: () => shown.remove() }, "×"));
  document.getElementById("toasts").append(shown);
  setTimeout(() => shown.remove(), TOAST_MS);
}

// Runs an action, and says what came of it. `left` are the messages that the broker did not process, by reason.
export async function attempt(action, said) {
  try {
    const answer = await action();
    const left = Object.entries(answer?.left ?? {}).map(([reason, count]) => `${count} left: ${reason}`);
    toast([said(answer), ...left].join("\n"), left.length > 0);
    return answer;
  } catch (error) {
    toast(error.message, true);
    return null;
  }
}

function open(title, content, buttons) {
  return new Promise((resolve) => {
    const close = (value) => {
      dialog.close();
      dialog.remove();
      resolve(value);
    };
    const dialog = h("dialog", { "aria-label": title, oncancel: () => close(null) },
      h("form", { onsubmit: (event) => { event.preventDefault(); close(buttons.value()); } },
        h("h2", {}, title), content,
        h("div", { class: "buttons" },
          h("button", { type: "button", onclick: () => close(null) }, "Cancel"),
          h("button", { type: "submit", class: buttons.danger ? "danger" : "primary" }, buttons.text))));
    document.body.append(dialog);
    dialog.showModal();
  });
}

// Asks before a dangerous action. With `word`, the user has to type the word.
export function confirmed(title, text, button, word = "") {
  const input = h("input", { name: "word", autocomplete: "off", required: true, "aria-label": `Type ${word}` });
  if (word) input.addEventListener("input", () => input.setCustomValidity(input.value === word ? "" : `Type ${word}`));
  const content = [h("p", {}, text), word ? h("label", {}, `Type ${word} to confirm`, input) : null];
  return open(title, content, { text: button, danger: true, value: () => true });
}

function control({ name, value = "", choices = null, attributes = {} }) {
  if (choices === null) return h("input", { autocomplete: "off", value, ...attributes, name });
  return h("select", { name }, choices.map((each) => h("option", { value: each, selected: each === value }, each || "default")));
}

// Asks for texts. A field has a name, a label, and perhaps a value, attributes of its input, or the choices that there are.
export function asked(title, fields, button) {
  const inputs = fields.map((field) => [field.name, control(field)]);
  const content = inputs.map(([, input], index) => h("label", {}, fields[index].label, input));
  const value = () => Object.fromEntries(inputs.map(([name, input]) => [name, input.value]));
  return open(title, content, { text: button, danger: false, value });
}
