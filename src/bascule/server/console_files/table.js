// Tables: of given cells, and of rows that the server searches, sorts and cuts.

import { look } from "./api.js";
import { h, number } from "./dom.js";

const LIMIT = 50;
const REFRESH_MS = 5000;
const TYPING_MS = 250;

// A table with these cells. The titles name the cells on a narrow screen, too.
export function grid(titles, rows) {
  return h("div", { class: "scroll" }, h("table", { class: "stacked" },
    h("thead", {}, h("tr", {}, titles.map((title) => h("th", { scope: "col" }, title)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, index) => h("td", { "data-title": titles[index] }, cell)))))));
}

// `request` is a list of requests.js, `columns` are {key, title, cell(row), numeric, long}. Returns the element and a function that ends the refreshing.
export function pagedTable(request, columns, state, options = {}) {
  const view = { search: state.search ?? "", sort: options.sort ?? columns[0].key, order: options.order ?? "ascending", offset: 0 };
  const body = h("tbody");
  const info = h("span", { class: "muted", role: "status" });
  const search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search", value: view.search, class: "search" });
  const previous = h("button", { onclick: () => move(-LIMIT) }, "Previous");
  const next = h("button", { onclick: () => move(LIMIT) }, "Next");
  const heads = columns.map((column) => head(column));
  let timer = null;
  let typing = null;
  let over = false;
  let asked = 0;

  function head(column) {
    if (column.key === undefined) return h("th", { scope: "col" }, column.title);
    return h("th", { scope: "col", class: column.numeric ? "num" : null },
      h("button", { class: "sort", onclick: () => sortBy(column.key) }, column.title));
  }

  function sortBy(key) {
    view.order = view.sort === key && view.order === "ascending" ? "descending" : "ascending";
    view.sort = key;
    view.offset = 0;
    load();
  }

  function move(by) {
    view.offset = Math.max(0, view.offset + by);
    load();
  }

  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      view.search = search.value;
      view.offset = 0;
      load();
    }, TYPING_MS);
  });

  async function load() {
    clearTimeout(timer);
    const mine = ++asked;
    try {
      const part = await look(request, { search: view.search, sort: view.sort, order: view.order, offset: view.offset, limit: LIMIT });
      if (mine === asked && !over) show(part);
    } catch (error) {
      info.textContent = error.message;
    }
    if (mine === asked && !over) timer = setTimeout(load, REFRESH_MS);
  }

  function show(part) {
    if (!body.contains(document.activeElement) || document.activeElement === document.body) {
      body.replaceChildren(...part.entries.map((row) => h("tr", {}, columns.map((column) => h("td",
        { class: column.numeric ? "num" : column.long ? "long" : null, "data-title": column.title },
        column.cell ? column.cell(row) : column.numeric ? number(row[column.key]) : row[column.key])))));
    }
    heads.forEach((each, index) => {
      if (columns[index].key === view.sort) each.setAttribute("aria-sort", view.order);
      else each.removeAttribute("aria-sort");
    });
    const last = view.offset + part.entries.length;
    const range = part.entries.length ? `${number(view.offset + 1)}–${number(last)} of ${number(part.found)}` : "none";
    if (!part.serving) info.textContent = "This broker does not serve clients. The active broker has the list.";
    else info.textContent = part.found === part.total ? range : `${range} found, ${number(part.total)} in all`;
    previous.disabled = view.offset === 0;
    next.disabled = last >= part.found;
  }

  load();
  const element = h("section", {},
    h("div", { class: "bar" }, search, options.buttons, h("span", { class: "grow" }), info, previous, next),
    h("div", { class: "scroll" }, h("table", { class: "stacked" }, h("thead", {}, h("tr", {}, heads)), body)));
  return { element, reload: load, end: () => { over = true; clearTimeout(timer); clearTimeout(typing); } };
}
