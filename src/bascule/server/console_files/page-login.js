// Log-in with a user's password, or with a token.

import { logIn } from "./api.js";
import { h } from "./dom.js";

export default {
  title: "Log in",
  render(done) {
    const user = h("input", { name: "user", autocomplete: "username" });
    const password = h("input", { name: "password", type: "password", autocomplete: "current-password", required: true });
    const error = h("p", { class: "error", role: "alert" });
    const button = h("button", { class: "primary" }, "Log in");
    const submit = async (event) => {
      event.preventDefault();
      button.disabled = true;
      error.textContent = "";
      try {
        await logIn(user.value, password.value);
        done();
      } catch (refusal) {
        error.textContent = refusal.message;
        password.select();
      }
      button.disabled = false;
    };
    return h("form", { class: "card login", onsubmit: submit },
      h("h1", {}, "Log in"),
      h("label", {}, "User, empty for a token", user),
      h("label", {}, "Password or token", password), error, button);
  },
};
