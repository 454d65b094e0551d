// Line charts as SVG.

import { h, s } from "./dom.js";

const WIDTH = 480;
const HEIGHT = 130;
const LEFT = 8;
const TOP = 18;
const BOTTOM = 8;

// `lines` are the names of the lines, `points` are [ms, ...values], a value may be null. `shown` makes a text of a value.
export function chart(title, lines, points, shown) {
  const values = points.flatMap((point) => point.slice(1)).filter((value) => value !== null);
  const highest = Math.max(1e-9, ...values);
  const first = points.length ? points[0][0] : 0;
  const span = Math.max(1, (points.length ? points.at(-1)[0] : 1) - first);
  const x = (ms) => LEFT + ((ms - first) / span) * (WIDTH - 2 * LEFT);
  const y = (value) => HEIGHT - BOTTOM - (value / highest) * (HEIGHT - TOP - BOTTOM);
  const last = points.at(-1) ?? [];
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": title },
    s("line", { x1: LEFT, x2: WIDTH - LEFT, y1: y(0), y2: y(0), class: "axis" }),
    s("line", { x1: LEFT, x2: WIDTH - LEFT, y1: y(highest), y2: y(highest), class: "grid" }),
    s("text", { x: LEFT, y: TOP - 5, class: "scale" }, values.length ? shown(highest) : ""),
    lines.map((_, index) => s("path", { class: `line line-${index}`, d: path(points, index + 1, x, y) })));
  return h("figure", { class: "card" },
    h("figcaption", {}, title),
    svg,
    h("div", { class: "legend" }, lines.map((name, index) => h("span", {}, h("i", { class: `key key-${index}` }), `${name} `,
      h("b", {}, last[index + 1] === null || last[index + 1] === undefined ? "–" : shown(last[index + 1]))))));
}

function path(points, column, x, y) {
  let begun = false;
  return points.map((point) => {
    if (point[column] === null) {
      begun = false;
      return "";
    }
    const step = `${begun ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[column]).toFixed(1)}`;
    begun = true;
    return step;
  }).join("");
}
