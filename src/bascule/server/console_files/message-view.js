// A message as the admin server describes it.

import { facts, h, moment, number } from "./dom.js";

const SHORT = 80;

export function bodyText(message) {
  const body = message.body ?? {};
  if (body.text !== undefined) return body.text;
  if (body.base64 !== undefined) return `${bytesOf(body.base64).length} bytes`;
  if (body.entries !== undefined) return body.entries.map((each) => (each.name === undefined ? each.value : `${each.name}=${each.value}`)).join(", ");
  return "";
}

export function shortBody(message) {
  const text = bodyText(message).replace(/\s+/g, " ");
  return text.length > SHORT ? `${text.slice(0, SHORT)}…` : text;
}

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
}

function hexDump(base64) {
  const bytes = bytesOf(base64);
  const lines = [];
  for (let start = 0; start < bytes.length; start += 16) {
    const part = [...bytes.slice(start, start + 16)];
    const hex = part.map((each) => each.toString(16).padStart(2, "0")).join(" ").padEnd(48);
    const text = part.map((each) => (each >= 32 && each < 127 ? String.fromCharCode(each) : ".")).join("");
    lines.push(`${start.toString(16).padStart(8, "0")}  ${hex} ${text}`);
  }
  return lines.join("\n");
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function bodyView(message) {
  const body = message.body ?? {};
  const cut = body.cut ? h("p", { class: "muted" }, "This is only the beginning. Download the body to see all of it.") : null;
  if (body.text !== undefined) return [h("pre", {}, body.cut ? body.text : pretty(body.text)), cut];
  if (body.base64 !== undefined) return [h("pre", {}, hexDump(body.base64)), cut];
  if (body.entries !== undefined) return [typed(body.entries), cut];
  return h("p", { class: "muted" }, "no body");
}

export function typed(entries) {
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Name", "Type", "Value"].map((each) => h("th", { scope: "col" }, each)))),
    h("tbody", {}, entries.map((each, index) => h("tr", {}, h("td", {}, each.name ?? index), h("td", {}, each.type), h("td", {}, each.value))))));
}

export function headersView(message) {
  return facts([["JMSMessageID", message.message_id], ["JMSCorrelationID", message.correlation_id], ["JMSDestination", message.destination],
    ["JMSReplyTo", message.reply_to], ["JMSType", message.type], ["JMSDeliveryMode", message.delivery_mode], ["JMSPriority", message.priority],
    ["JMSTimestamp", moment(message.timestamp_ms)], ["JMSExpiration", moment(message.expiration_ms)], ["JMSXGroupID", message.group_id],
    ["JMSXUserID", message.user_id], ["Failed deliveries", number(message.failed_deliveries)], ["Size", `${number(message.bytes)} bytes`],
    ["State", message.state], ["Due", moment(message.due_ms)], ["Stored in the journal", message.stored ? "yes" : "no"],
    ["Unreadable", message.unreadable]]);
}
