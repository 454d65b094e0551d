// Elements from data. Texts become text nodes: no data is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false).map(node));
  return element;
}

function node(value) {
  return value instanceof Node ? value : document.createTextNode(String(value));
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function link(page, parameters, ...children) {
  return h("a", { href: address(page, parameters) }, children);
}

// A name that says which one is meant if a queue and the queue of a subscription have the same name.
export function queueReference(name, subscription) {
  if (subscription) return `subscription://${name}`;
  return name.includes("://") ? `queue://${name}` : name;
}

export function address(page, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "")).toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}

const NUMBER = new Intl.NumberFormat("en-US");

export function number(value) {
  return typeof value === "number" ? NUMBER.format(Math.round(value * 100) / 100) : value ?? "";
}

export function bytes(value) {
  if (typeof value !== "number") return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  while (value >= 1024 && index < units.length - 1) {
    value /= 1024;
    index += 1;
  }
  return `${index ? value.toFixed(1) : value} ${units[index]}`;
}

// The lag of a pipeline in offsets, and its estimated size.
export function behind({ lag, lag_bytes: size }) {
  return lag && size !== null ? `${number(lag)} (${bytes(size)})` : number(lag);
}

// The quantiles of a latency in seconds, null without records.
export function latency({ latency_p50_s: half, latency_p99_s: most }) {
  const shown = (seconds) => (seconds < 1 ? `${number(Math.round(seconds * 1000))} ms` : `${number(seconds)} s`);
  return half === null || most === null ? "" : `${shown(half)} / ${shown(most)}`;
}

export function moment(ms) {
  if (!ms) return "";
  const date = new Date(ms);
  return Number.isNaN(date.getTime()) ? String(ms) : date.toISOString().replace("T", " ").replace("Z", " UTC");
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined)
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}
