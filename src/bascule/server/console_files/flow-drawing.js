// Diverts and ingresses by the settings of the broker, as a drawing.

import { h, number, s } from "./dom.js";

const ROW = 64;
const BOX = { width: 190, height: 44 };
const COLUMNS = [10, 270, 530];
const TEXT_MAX = 25;

function short(text) {
  return text.length > TEXT_MAX ? `${text.slice(0, TEXT_MAX - 1)}…` : text;
}

function box(column, row, title, detail, kind) {
  const x = COLUMNS[column];
  const y = row * ROW + 10;
  return s("g", { class: `box ${kind}` }, s("title", {}, `${title} ${detail}`),
    s("rect", { x, y, width: BOX.width, height: BOX.height, rx: 8 }),
    s("text", { x: x + 10, y: y + 18 }, short(title)), s("text", { x: x + 10, y: y + 34, class: "detail" }, short(detail)));
}

function arrow(from, row, moves) {
  const y = row * ROW + 10 + BOX.height / 2;
  const end = COLUMNS[from + 1] - 2;
  return s("path", { class: moves ? "arrow moves" : "arrow", d: `M${COLUMNS[from] + BOX.width} ${y}H${end}M${end - 7} ${y - 5}L${end} ${y}L${end - 7} ${y + 5}` });
}

// The waiting messages of an address, and how fast their number changes.
function depth(flow, before, name, passed_ms) {
  const now = flow.addresses[name];
  if (!now) return name.includes("*") || name.includes("#") ? "pattern" : "no queue";
  const was = before?.addresses[name];
  const change = was ? ((now.messages - was.messages) * 1000) / passed_ms : 0;
  return `${number(now.messages)} waiting${change ? `, ${change > 0 ? "+" : ""}${number(change)}/s` : ""}`;
}

export function drawing(flow, before, passed_ms) {
  const rows = [
    ...flow.diverts.map((each) => [[each.from, depth(flow, before, each.from, passed_ms), "address"], [each.name, lag(each), "pipeline"], [each.to, "Kafka topic", "topic"], each]),
    ...flow.ingresses.map((each) => [[each.topics.join(", ") || each.pattern, "Kafka topic", "topic"], [each.name, each.enabled ? "ingress" : "disabled", "pipeline"],
      [each.to, depth(flow, before, each.to, passed_ms), "address"], each]),
  ];
  if (!rows.length) return h("p", { class: "muted" }, "The settings have no diverts and no ingresses.");
  return h("div", { class: "scroll" }, s("svg", { viewBox: `0 0 730 ${rows.length * ROW + 10}`, class: "flow", role: "img", "aria-label": "Flow of messages" },
    rows.map(([from, pipeline, to, each], row) => [box(0, row, ...from), box(1, row, ...pipeline), box(2, row, ...to),
      arrow(0, row, each.enabled), arrow(1, row, each.enabled)])));
}

function lag(divert) {
  if (!divert.enabled) return "disabled";
  return divert.pin ? `${number(divert.pin.records)} records behind` : "no position known";
}
