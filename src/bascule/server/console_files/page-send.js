// Sends a message; with `queue` and `id`, a message of a queue is the draft.

import { act, look } from "./api.js";
import { attempt, toast } from "./dialogs.js";
import { h } from "./dom.js";
import { MESSAGES } from "./requests.js";

const TYPES = ["string", "boolean", "byte", "short", "int", "long", "float", "double"];
const KINDS = { text: "Text", bytes: "Bytes, in base64", map: 'Map, as JSON: {"name": {"type": "int", "value": 1}}', message: "No body" };

function select(name, options, value) {
  return h("select", { name }, Object.entries(options).map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
}

function propertyRow(name = "", type = "string", value = "") {
  const row = h("div", { class: "bar property" },
    h("input", { "aria-label": "Name of a property", placeholder: "name", value: name }),
    select("type", Object.fromEntries(TYPES.map((each) => [each, each])), type),
    h("input", { "aria-label": "Value of a property", placeholder: "value", value }),
    h("button", { type: "button", "aria-label": "Remove the property", onclick: () => row.remove() }, "×"));
  return row;
}

function given(form, properties) {
  const field = (name) => form.elements.namedItem(name);
  const rows = [...properties.children].map((row) => [...row.querySelectorAll("input, select")].map((each) => each.value));
  return {
    to: field("to").value, topic: field("topic").checked, kind: field("kind").value, body: field("body").value,
    properties: Object.fromEntries(rows.filter(([name]) => name).map(([name, type, value]) => [name, { type, value }])),
    correlation_id: field("correlation_id").value, reply_to: field("reply_to").value, type: field("jmstype").value,
    group_id: field("group_id").value, priority: Number(field("priority").value), ttl_ms: Number(field("ttl_ms").value),
    delay_ms: Number(field("delay_ms").value), persistent: field("persistent").checked,
  };
}

function draft(form, properties, message) {
  const set = (name, value) => { form.elements.namedItem(name).value = value ?? ""; };
  set("correlation_id", message.correlation_id);
  set("reply_to", message.reply_to);
  set("jmstype", message.type);
  set("group_id", message.group_id);
  set("priority", message.priority);
  if (message.destination) set("to", message.destination);
  form.elements.namedItem("topic").checked = message.destination_kind === "topic";
  const body = message.body ?? {};
  const kind = message.body_kind in KINDS ? message.body_kind : "message";
  set("kind", kind);
  if (kind === "text") set("body", body.text);
  if (kind === "bytes") set("body", body.base64);
  if (kind === "map") {
    const entries = body.entries.map((each) => [each.name, { type: each.type, value: plain(each) }]);
    set("body", JSON.stringify(Object.fromEntries(entries), null, 1));
  }
  if (body.cut || kind !== message.body_kind) toast("the draft does not have the whole body", true);
  if (Object.values(message.properties).some((each) => each.type === "masked")) toast("the draft does not have the masked properties", true);
  properties.replaceChildren(...Object.entries(message.properties).filter(([, each]) => TYPES.includes(each.type))
    .map(([name, each]) => propertyRow(name, each.type, each.value)));
}

function plain({ type, value }) {
  if (type === "boolean") return value === "true";
  return ["byte", "short", "int", "long", "float", "double"].includes(type) ? Number(value) : value;
}

export default {
  title: "Send",
  role: "edit",
  render({ to = "", topic = "", queue = "", id = "" }) {
    const properties = h("div");
    const input = (title, attributes) => h("label", {}, title, h("input", { autocomplete: "off", ...attributes }));
    const send = async (event) => {
      event.preventDefault();
      await attempt(() => act(MESSAGES.send, given(form, properties)), (answer) => `sent ${answer.sent}`);
    };
    const form = h("form", { class: "card form", onsubmit: send },
      input("Queue or topic", { name: "to", value: to, required: true }),
      h("label", { class: "check" }, h("input", { type: "checkbox", name: "topic", checked: topic === "true" }), "It is a topic"),
      h("label", {}, "Kind", select("kind", KINDS, "text")),
      h("label", {}, "Body", h("textarea", { name: "body", rows: 8, spellcheck: "false" })),
      h("fieldset", {}, h("legend", {}, "Properties"), properties,
        h("button", { type: "button", onclick: () => properties.append(propertyRow()) }, "Add a property")),
      h("details", {}, h("summary", {}, "Headers"),
        input("JMSType", { name: "jmstype" }), input("JMSCorrelationID", { name: "correlation_id" }), input("JMSReplyTo, a queue", { name: "reply_to" }),
        input("JMSXGroupID", { name: "group_id" }), input("JMSPriority", { name: "priority", type: "number", min: 0, max: 9, value: 4 }),
        input("Time to live in ms, 0 for ever", { name: "ttl_ms", type: "number", min: 0, value: 0 }),
        input("Delay in ms", { name: "delay_ms", type: "number", min: 0, value: 0 }),
        h("label", { class: "check" }, h("input", { type: "checkbox", name: "persistent", checked: true }), "Persistent")),
      h("button", { class: "primary" }, "Send"));
    if (id) {
      look(MESSAGES.show, { queue, id }).then((message) => draft(form, properties, message)).catch((error) => toast(error.message, true));
    }
    return { element: form };
  },
};
