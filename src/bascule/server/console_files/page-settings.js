// The settings of this broker as they hold; secrets are masked.

import { look } from "./api.js";
import { h, link } from "./dom.js";
import { BROKER } from "./requests.js";

export default {
  title: "Settings",
  role: "manage",
  render() {
    const body = h("tbody");
    const filter = h("input", { type: "search", placeholder: "Search", "aria-label": "Search", class: "search" });
    let rows = [];
    const show = () => {
      const wanted = filter.value.toLowerCase();
      body.replaceChildren(...rows.filter((row) => `${row.setting} ${row.value}`.toLowerCase().includes(wanted))
        .map((row) => h("tr", {}, h("td", {}, h("code", {}, row.setting)), h("td", {}, row.value))));
    };
    filter.addEventListener("input", show);
    look(BROKER.settings).then((found) => { rows = found; show(); }).catch((error) => body.replaceChildren(h("tr", {}, h("td", { class: "error" }, error.message))));
    const more = h("p", {}, "Diverts and ingresses that are defined at run time are no settings: see ", link("pipelines", {}, "Pipelines"), ".");
    return { element: h("div", {}, more, h("div", { class: "bar" }, filter), h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Setting"), h("th", { scope: "col" }, "Value"))), body))) };
  },
};
