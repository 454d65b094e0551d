// All diverts and ingresses with their ends, as a drawing.

import { h, number, s } from "./dom.js";

const ROW = 76;
const BOX = { width: 210, height: 58 };
const COLUMNS = [10, 290, 570];
const WIDTH = 790;
const TEXT_MAX = 28;
const MOVING = ["running", "catching up"];
const BROKEN = ["failed", "unassigned", "restarting", "waiting for coverage"];

function short(text) {
  return text.length > TEXT_MAX ? `${text.slice(0, TEXT_MAX - 1)}…` : text;
}

function box(column, row, title, details, kind) {
  const x = COLUMNS[column];
  const y = row * ROW + 10;
  return s("g", { class: `box ${kind}` }, s("title", {}, [title, ...details].join("\n")),
    s("rect", { x, y, width: BOX.width, height: BOX.height, rx: 8 }),
    s("text", { x: x + 10, y: y + 18 }, short(title)),
    details.slice(0, 2).map((each, line) => s("text", { x: x + 10, y: y + 34 + 14 * line, class: "detail" }, short(each))));
}

function arrow(from, row, moves) {
  const y = row * ROW + 10 + BOX.height / 2;
  const end = COLUMNS[from + 1] - 2;
  return s("path", { class: moves ? "arrow moves" : "arrow", d: `M${COLUMNS[from] + BOX.width} ${y}H${end}M${end - 7} ${y - 5}L${end} ${y}L${end - 7} ${y + 5}` });
}

// The waiting messages of an address, and how fast their number changes.
function depth(flow, before, name, passed_ms) {
  const now = flow.addresses[name];
  if (!now) return [name.includes("*") || name.includes("#") || name.includes("${") ? "several addresses" : "no queue"];
  const was = before?.addresses[name];
  const change = was ? ((now.messages - was.messages) * 1000) / passed_ms : 0;
  return [`${number(now.messages)} waiting`, change ? `${change > 0 ? "+" : ""}${number(change)}/s` : ""];
}

function address(flow, before, name, passed_ms) {
  return [name, depth(flow, before, name, passed_ms), "address"];
}

function topic(name) {
  return [name, ["Kafka topic"], "topic"];
}

// The state of a pipeline, and its rate and lag; the title of the box has the last error, too.
function pipeline(each) {
  const state = !each.enabled ? "disabled" : each.state || "state unknown";
  const behind = each.lag ?? each.pin?.records ?? null;
  const figures = [each.records_per_s === null ? "" : `${number(each.records_per_s)}/s`, behind === null ? "no position known" : `${number(behind)} behind`];
  const kinds = ["pipeline", each.origin === "runtime" ? "runtime" : "", BROKEN.includes(each.state) ? "broken" : ""];
  const marked = each.origin === "runtime" ? `${state}, at run time` : state;
  return [each.name, [marked, figures.filter(Boolean).join(", "), each.error].filter(Boolean), kinds.filter(Boolean).join(" ")];
}

function moves(each) {
  return each.enabled && (each.state ? MOVING.includes(each.state) : true);
}

export function drawing(flow, before, passed_ms) {
  const rows = [
    ...flow.diverts.map((each) => [address(flow, before, each.from, passed_ms), pipeline(each), topic(each.to), each]),
    ...flow.ingresses.map((each) => [topic(each.topics.join(", ") || each.pattern), pipeline(each), address(flow, before, each.to, passed_ms), each]),
  ];
  if (!rows.length) return h("p", { class: "muted" }, "There are no diverts and no ingresses.");
  return h("div", { class: "scroll" }, s("svg", { viewBox: `0 0 ${WIDTH} ${rows.length * ROW + 10}`, class: "flow", role: "img", "aria-label": "Flow of messages" },
    rows.map(([from, through, to, each], row) => [box(0, row, ...from), box(1, row, ...through), box(2, row, ...to),
      arrow(0, row, moves(each)), arrow(1, row, moves(each))])));
}
