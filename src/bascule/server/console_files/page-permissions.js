// The permissions as they hold, and the decision for a user.

import { look } from "./api.js";
import { toast } from "./dialogs.js";
import { h } from "./dom.js";
import { BROKER } from "./requests.js";

function rules(found) {
  if (!found.length) return h("p", {}, "There are no rules, so every client may do everything.");
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Address"), h("th", { scope: "col" }, "Permissions of roles"))),
    h("tbody", {}, found.map((rule) => h("tr", {}, h("td", {}, h("code", {}, rule.match)),
      h("td", {}, Object.entries(rule.roles).map(([permission, roles]) => h("div", {}, `${permission}: ${roles.join(", ")}`))))))));
}

export default {
  title: "Permissions",
  role: "manage",
  render() {
    const element = h("div");
    look(BROKER.permissions).then((answer) => {
      const user = h("input", { name: "user" });
      const permission = h("select", { name: "permission" }, answer.permissions.map((each) => h("option", { value: each }, each)));
      const place = h("input", { name: "address", required: true });
      const result = h("p", { role: "status" });
      const ask = async (event) => {
        event.preventDefault();
        try {
          const { decision } = await look(BROKER.permissions, { user: user.value, permission: permission.value, address: place.value });
          result.className = decision.allowed ? "well" : "error";
          result.textContent = `${decision.allowed ? "allowed" : "denied"}: ${decision.reason}`;
        } catch (error) {
          toast(error.message, true);
        }
      };
      element.replaceChildren(rules(answer.rules), h("h2", {}, "May a user do this?"),
        h("form", { class: "bar wide", onsubmit: ask }, h("label", {}, "User", user), h("label", {}, "Permission", permission),
          h("label", {}, "Address", place), h("button", { class: "primary" }, "Ask")), result);
    }).catch((error) => element.replaceChildren(h("p", { class: "error" }, error.message)));
    return { element };
  },
};
