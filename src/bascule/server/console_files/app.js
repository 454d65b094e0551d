// The frame of the console: log-in, navigation, and the page that the address names.

import { logOut, may, refreshSession, session } from "./api.js";
import { toast } from "./dialogs.js";
import { address, h } from "./dom.js";
import { follow, live, start, stop } from "./live.js";
import login from "./page-login.js";
import overview from "./page-overview.js";
import queues from "./page-queues.js";
import queue from "./page-queue.js";
import topics from "./page-topics.js";
import subscriptions from "./page-subscriptions.js";
import connections from "./page-connections.js";
import connection from "./page-connection.js";
import messages from "./page-messages.js";
import message from "./page-message.js";
import send from "./page-send.js";
import life from "./page-life.js";
import deadLetters from "./page-dead-letters.js";
import selector from "./page-selector.js";
import pipelines from "./page-pipelines.js";
import pipeline from "./page-pipeline.js";
import undelivered from "./page-undelivered.js";
import transactions from "./page-transactions.js";
import brokers from "./page-brokers.js";
import settings from "./page-settings.js";
import permissions from "./page-permissions.js";

const PAGES = {
  overview, queues, queue, topics, subscriptions, connections, connection, messages, message, life, send, "dead-letters": deadLetters,
  selector, pipelines, pipeline, undelivered, transactions, brokers, settings, permissions,
};
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const menu = document.getElementById("menu");
let end = null;

function place() {
  const [name, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: PAGES[name] ? name : "overview", parameters: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

function show() {
  end?.();
  end = null;
  nav.classList.remove("open");
  menu.setAttribute("aria-expanded", "false");
  const { name, parameters } = place();
  drawFrame(name);
  if (session.name === null) {
    stop();
    document.title = "Log in – Bascule";
    main.replaceChildren(login.render(show));
    main.querySelector("input")?.focus();
    return;
  }
  start();
  const page = PAGES[name];
  document.title = `${page.title} – Bascule`;
  if (page.role && !may(page.role)) {
    main.replaceChildren(h("h1", {}, page.title), h("p", {}, `This page needs the role ${page.role}; you have the role ${session.role}.`));
    return;
  }
  const made = page.render(parameters);
  main.replaceChildren(h("h1", {}, page.title), made.element);
  main.setAttribute("data-page", name);
  end = made.end ?? null;
}

function drawFrame(current) {
  const known = session.name !== null;
  document.getElementById("who").textContent = known ? `${session.name} (${session.role})` : "";
  document.getElementById("logout").hidden = !known || !session.restricted;
  nav.hidden = menu.hidden = !known;
  nav.replaceChildren(...Object.entries(PAGES).filter(([, page]) => !page.hidden && (!page.role || may(page.role))).map(([name, page]) =>
    h("a", { href: address(name), "aria-current": name === current ? "page" : null }, page.title)));
}

function drawState() {
  const state = document.getElementById("state");
  const well = live.error === "" && live.now?.serving;
  state.className = well ? "well" : "trouble";
  state.textContent = live.error || (live.now === null ? "" : live.now.serving ? `serving ${live.now.bridge}` : live.now.reason || live.now.state);
}

menu.addEventListener("click", () => menu.setAttribute("aria-expanded", String(nav.classList.toggle("open"))));
document.getElementById("logout").addEventListener("click", async () => {
  try {
    await logOut();
  } catch (error) {
    toast(error.message, true);
  }
  show();
});
window.addEventListener("hashchange", () => { show(); main.focus(); });
window.addEventListener("logged-out", show);
follow(drawState);
try {
  await refreshSession();
} catch (error) {
  toast(error.message, true);
}
show();
