// Diverts and ingresses by the settings, as a drawing and as tables.

import { get } from "./api.js";
import { bytes, h, link, number, s } from "./dom.js";

const REFRESH_MS = 3000;
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
function depth(flow, before, name) {
  const now = flow.addresses[name];
  if (!now) return name.includes("*") || name.includes("#") ? "pattern" : "no queue";
  const was = before?.addresses[name];
  const change = was ? ((now.messages - was.messages) * 1000) / REFRESH_MS : 0;
  return `${number(now.messages)} waiting${change ? `, ${change > 0 ? "+" : ""}${number(change)}/s` : ""}`;
}

function drawing(flow, before) {
  const rows = [
    ...flow.diverts.map((each) => [[each.from, depth(flow, before, each.from), "address"], [each.name, lag(each), "pipeline"], [each.to, "Kafka topic", "topic"], each]),
    ...flow.ingresses.map((each) => [[each.topics.join(", ") || each.pattern, "Kafka topic", "topic"], [each.name, each.enabled ? "ingress" : "disabled", "pipeline"],
      [each.to, depth(flow, before, each.to), "address"], each]),
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

function diverts(flow) {
  const titles = ["Divert", "From", "Selector", "To", "Behind", "Keeps", "State"];
  return h("div", { class: "scroll" }, h("table", { class: "stacked" }, h("thead", {}, h("tr", {}, titles.map((each) => h("th", { scope: "col" }, each)))),
    h("tbody", {}, flow.diverts.map((each) => h("tr", {}, [each.name, flow.addresses[each.from] ? link("queue", { name: each.from }, each.from) : each.from,
      each.selector, each.to, each.pin ? `${number(each.pin.records)} records` : "", each.pin ? bytes(each.pin.bytes) : "",
      each.enabled ? each.pin?.reason || "enabled" : "disabled"].map((cell, index) => h("td", { "data-title": titles[index] }, cell)))))));
}

function ingresses(flow) {
  const titles = ["Ingress", "Topics", "To", "Routing", "State"];
  return h("div", { class: "scroll" }, h("table", { class: "stacked" }, h("thead", {}, h("tr", {}, titles.map((each) => h("th", { scope: "col" }, each)))),
    h("tbody", {}, flow.ingresses.map((each) => h("tr", {}, [each.name, each.topics.join(", ") || each.pattern, each.to, each.routing,
      each.enabled ? "enabled" : "disabled"].map((cell, index) => h("td", { "data-title": titles[index] }, cell)))))));
}

export default {
  title: "Pipelines",
  render() {
    const element = h("div");
    let timer = null;
    let over = false;
    let before = null;
    const load = async () => {
      try {
        const flow = await get("flow");
        element.replaceChildren(drawing(flow, before), h("h2", {}, "Diverts"), diverts(flow), h("h2", {}, "Ingresses"), ingresses(flow),
          h("p", { class: "muted" }, "By the settings of this broker. The lag is that of the last snapshot of the journal."));
        before = flow;
      } catch (error) {
        element.replaceChildren(h("p", { class: "error" }, error.message));
      }
      if (!over) timer = setTimeout(load, REFRESH_MS);
    };
    load();
    return { element, end: () => { over = true; clearTimeout(timer); } };
  },
};
