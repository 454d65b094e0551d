// Walks through every page of the console with a live broker, as three users. tests/scenarios/test_console.py has prepared the broker.

import { check, enter, goTo, hidesText, logIn, picture, press, shows, started } from "./browser.mjs";

const HOSTILE = process.env.HOSTILE;
const XID = process.env.XID;
const { browser, page, faults } = await started();
const rows = () => page.$$eval("main tbody tr", (found) => found.length);

async function closeToasts() {
  await page.$$eval(".toast button", (found) => found.forEach((each) => each.click()));
}

// The status of a request with the session of the page, whatever buttons the page has.
function statusOf(method, path) {
  return page.evaluate(async (wanted, place) => {
    const { csrf } = await (await fetch("/console/session")).json();
    const headers = { "content-type": "application/json", "x-csrf-token": csrf, "x-bascule-console": "1" };
    return (await fetch(place, { method: wanted, headers, body: wanted === "GET" ? undefined : "{}" })).status;
  }, method, path);
}

async function forbidden(user, requests) {
  for (const [method, path] of requests) {
    const status = await statusOf(method, path);
    check(status === 403, `${method} ${path} of ${user} has the status ${status}`);
  }
}

async function chooseFirst() {
  await page.waitForSelector("main tbody input[type=checkbox]");
  await page.$eval("main tbody input[type=checkbox]", (box) => box.click());
}

const steps = {
  async "a wrong password is refused in the page"() {
    await page.setViewport({ width: 1180, height: 760 });
    await logIn(page, "ann", "wrong");
    await shows(page, "unknown user or wrong password");
    await picture(page, "login");
  },
  async "the overview has live charts"() {
    await logIn(page, "ann", "secret");
    await shows(page, "Messages a second");
    await page.waitForFunction(() => /L/.test(document.querySelector(".charts figure:nth-child(2) .line-0")?.getAttribute("d") ?? ""));
    await shows(page, "serving");
    await page.waitForFunction(() => [...document.querySelectorAll(".charts figure")].some((each) => each.innerText.includes("p99")
      && [".line-0", ".line-1"].every((line) => /L/.test(each.querySelector(line)?.getAttribute("d") ?? "")) && / ms/.test(each.innerText)));
    await page.waitForFunction(() => [...document.querySelectorAll(".charts figure")].some((each) => /Lag of pipelines[^]*diverts 6/.test(each.innerText)));
    if (process.env.PICTURES) // one point every two seconds
      await page.waitForFunction(() => document.querySelector(".charts .line-0").getAttribute("d").split("L").length > 12, { timeout: 60_000 });
    await picture(page, "overview");
  },
  async "queues are searched by the server, and made"() {
    await goTo(page, "Queues");
    await shows(page, "orders.007");
    check((await rows()) === 50, `a page has 50 queues, not ${await rows()}`);
    await picture(page, "queues");
    await press(page, "Next");
    await hidesText(page, "orders.007");
    await page.$eval("main input[type=search]", (field) => {
      field.value = "ORDERS.06";
      field.dispatchEvent(new Event("input"));
    });
    await shows(page, "1–10 of 10 found");
    await press(page, "Create");
    await enter(page, "name", "made.here", "dialog");
    await press(page, "Create", "dialog");
    await shows(page, "created made.here");
  },
  async "one queue shows its consumers and settings"() {
    await page.goto(`${process.env.ADMIN}/console/#/queue?name=watched`);
    await shows(page, "colour = 'red'");
    await shows(page, "deliveries_max");
    await picture(page, "queue");
  },
  async "a queue with a hostile name is text"() {
    await page.goto(`${process.env.ADMIN}/console/#/queues?search=onerror`);
    await shows(page, HOSTILE);
    await press(page, HOSTILE);
    await shows(page, "Settings of its address");
    await press(page, "Messages");
    await shows(page, HOSTILE);
  },
  async "topics and subscriptions"() {
    await goTo(page, "Topics");
    await press(page, "prices");
    await shows(page, "billing");
    await picture(page, "subscriptions");
    await goTo(page, "Topics");
    await picture(page, "topics");
  },
  async "connections have links with their selectors"() {
    await goTo(page, "Connections");
    await shows(page, "watcher");
    await picture(page, "connections");
    await page.evaluate(() => [...document.querySelectorAll("main tbody tr")].find((row) => row.innerText.includes("watcher")).querySelector("a").click());
    await shows(page, "colour = 'red'");
    await picture(page, "connection");
  },
  async "messages are found by selector and by text"() {
    await goTo(page, "Messages");
    await enter(page, "queue", "flights");
    await enter(page, "selector", "dep_delay > 30");
    await press(page, "Show");
    await shows(page, "2 shown");
    await enter(page, "selector", "dep_delay >");
    await press(page, "Show");
    await shows(page, "selector: column");
    await enter(page, "selector", "");
    await enter(page, "text", "Nantucket");
    await press(page, "Show");
    await shows(page, "1 shown");
    await enter(page, "text", "");
    await press(page, "Show");
    await shows(page, "5 shown");
    await picture(page, "messages");
  },
  async "one message has headers, properties and body"() {
    await page.$eval("main tbody a", (each) => each.click());
    await shows(page, "JMSMessageID");
    await shows(page, "dep_delay");
    await picture(page, "message");
    const size = await page.evaluate(async () => (await (await fetch(document.querySelector("a[download]").href)).text()).length);
    check(size > 10, "the body can be downloaded");
  },
  async "the life of a message is shown from its page, and searched by its id"() {
    await press(page, "What happened");
    await shows(page, "accepted");
    await shows(page, "waiting");
    await picture(page, "life");
    await enter(page, "id", "ID:nobody");
    await press(page, "Search");
    await shows(page, "No message with this id");
    await page.$eval("main input[name=follow]", (box) => box.click());
    await shows(page, "Following.");
    await page.waitForResponse((answer) => answer.url().includes("/messages/life?"));
    await page.$eval("main input[name=follow]", (box) => box.click());
    await hidesText(page, "Following.");
  },
  async "hostile headers, properties and bodies are text"() {
    await page.goto(`${process.env.ADMIN}/console/#/messages?queue=hostile`);
    await shows(page, "<script>");
    for (let index = 0; index < 4; index += 1) {
      await page.waitForFunction((wanted) => document.querySelectorAll("main tbody tr").length > wanted, {}, index);
      await page.evaluate((wanted) => document.querySelectorAll("main tbody a")[wanted].click(), index);
      await shows(page, "JMSMessageID");
      await shows(page, HOSTILE);
      await press(page, "All messages");
    }
    const made = await page.evaluate(() => [window.hacked === undefined, document.querySelectorAll("main img, main script, main iframe").length]);
    check(made[0] && made[1] === 0, `content of a message became part of the page: ${made}`);
  },
  async "chosen messages are deleted and moved"() {
    await page.goto(`${process.env.ADMIN}/console/#/messages?queue=flights`);
    await shows(page, "5 shown");
    await chooseFirst();
    await press(page, "Delete");
    await press(page, "Delete", "dialog");
    await shows(page, "deleted 1");
    await shows(page, "4 shown");
    await chooseFirst();
    await press(page, "Move");
    await enter(page, "to", "made.here", "dialog");
    await press(page, "Move", "dialog");
    await shows(page, "moved 1");
    await shows(page, "3 shown");
  },
  async "a message is sent, and sent again edited"() {
    await goTo(page, "Send");
    await enter(page, "to", "made.here");
    await enter(page, "body", '{"from": "the console"}');
    await press(page, "Add a property");
    await page.$$eval(".property input", ([name, value]) => {
      name.value = "carrier";
      value.value = "UA";
    });
    await picture(page, "send");
    await press(page, "Send");
    await shows(page, "sent ID:");
    await page.goto(`${process.env.ADMIN}/console/#/messages?queue=made.here&selector=carrier%20%3D%20'UA'`);
    await shows(page, "the console");
    await page.$eval("main tbody a", (each) => each.click());
    await press(page, "Send again, edited");
    await page.waitForFunction(() => document.querySelector("[name=body]")?.value.includes("the console"));
    await press(page, "Send");
    await shows(page, "sent ID:");
  },
  async "a queue is purged after its name was typed"() {
    await page.goto(`${process.env.ADMIN}/console/#/queue?name=made.here`);
    await press(page, "Purge");
    await enter(page, "word", "made.there", "dialog");
    await press(page, "Purge", "dialog");
    check(await page.$("dialog[open]"), "the wrong word must not be enough");
    await enter(page, "word", "made.here", "dialog");
    await press(page, "Purge", "dialog");
    await shows(page, "purged");
  },
  async "dead letters have a cause, and return"() {
    await goTo(page, "Dead letters");
    await shows(page, "broken");
    await shows(page, "2 shown");
    await picture(page, "dead-letters");
    await chooseFirst();
    await press(page, "Return to origin");
    await shows(page, "returned 1");
    await shows(page, "1 shown");
    await press(page, "Return all");
    await press(page, "Return all", "dialog");
    await shows(page, "There are no dead letters.");
  },
  async "a selector is tried on live messages"() {
    await goTo(page, "Selector");
    await enter(page, "queue", "flights");
    await enter(page, "selector", "carrier = 'UA'");
    await press(page, "Try");
    await shows(page, "3 shown");
    check((await page.$$eval(".unmatched", (found) => found.length)) > 0, "messages that do not match are marked");
    await picture(page, "selector");
  },
  async "pipelines are drawn, paused, resumed and stopped"() {
    await goTo(page, "Pipelines");
    await shows(page, "delayed");
    await page.waitForSelector("svg.flow .box");
    await shows(page, "in the file");
    await shows(page, "21 ms / 1.5 s");
    check((await page.$$("svg.flow .runtime")).length === 0, "no pipeline is drawn as defined at run time");
    await press(page, "pause");
    await shows(page, "running, paused wanted");
    await press(page, "resume");
    await hidesText(page, "paused wanted");
    await press(page, "restart");
    await shows(page, "The task of the pipeline ends and starts again at its position.");
    await press(page, "restart", "dialog");
    await shows(page, "restart: delayed");
    await closeToasts();
    await press(page, "stop");
    await press(page, "stop", "dialog");
    await shows(page, "running, stopped wanted");
    await press(page, "delayed");
    await shows(page, "Definition in the configuration file");
    await shows(page, "console.journal");
    await shows(page, "21 ms / 1.5 s");
    await picture(page, "pipeline");
    await press(page, "Reset the position");
    await shows(page, "delayed' is still running");
    await closeToasts();
    await press(page, "Move the position");
    await enter(page, "to", "earliest", "dialog");
    await press(page, "Show what it means", "dialog");
    await shows(page, "delayed' is still running");
  },
  async "a pipeline shows what became of the last move of its position"() {
    const pageOf = (collection, name) => page.goto(`${process.env.ADMIN}/console/#/pipeline?collection=${collection}&name=${name}`);
    await pageOf("diverts", "delayed");
    await shows(page, "accepted; the driver has not handled it yet (asked by bob");
    await pageOf("ingresses", "airports");
    await shows(page, "refused, nothing has moved: topic 'airports' was recreated (asked by bob");
    await pageOf("ingresses", "weather");
    await shows(page, "applied: the positions have moved (asked by bob");
  },
  async "a position is moved as its plan says, after the plan was confirmed"() {
    await press(page, "stop");
    await press(page, "stop", "dialog");
    await shows(page, "unassigned, stopped wanted");
    await press(page, "Move the position");
    await enter(page, "to", "earliest", "dialog");
    await press(page, "Show what it means", "dialog");
    await shows(page, "weather 0: from 2 to 0, skips 0, repeats 2");
    await press(page, "Move", "dialog");
    await shows(page, "accepted; the driver has not handled it yet (asked by ann");
  },
  async "an ingress is created and deleted"() {
    await goTo(page, "Pipelines");
    await press(page, "Create an ingress");
    await enter(page, "name", "prices", "dialog");
    await enter(page, "topics", "prices, more", "dialog");
    await enter(page, "to", "queue://prices", "dialog");
    await press(page, "Create", "dialog");
    await shows(page, "at run time");
    await page.waitForSelector("svg.flow .box.runtime");
    await closeToasts();
    await picture(page, "pipelines");
    await press(page, "prices");
    await shows(page, "Definition made at run time");
    await shows(page, '["prices","more"]');
    await press(page, "Change");
    check((await page.$eval("dialog [name=topics]", (field) => field.value)) === "prices, more", "the form has the settings of now");
    await enter(page, "topics", "prices", "dialog");
    await enter(page, "body", "bytes", "dialog");
    await enter(page, "tasks", "2", "dialog");
    await press(page, "Change", "dialog");
    await shows(page, "changed prices (revision 2)");
    await shows(page, '["prices"]');
    await closeToasts();
    await press(page, "Delete");
    await enter(page, "word", "prices", "dialog");
    await press(page, "Delete", "dialog");
    await shows(page, "there is no ingress 'prices'");
  },
  async "a divert is created and deleted"() {
    await goTo(page, "Pipelines");
    await press(page, "Create a divert");
    await enter(page, "name", "late", "dialog");
    await enter(page, "from", "news.#", "dialog");
    await enter(page, "to", "late", "dialog");
    await press(page, "Create", "dialog");
    await shows(page, "at run time");
    await press(page, "late");
    await shows(page, "Definition made at run time");
    await shows(page, "news.#");
    await press(page, "Change");
    await enter(page, "selector", "colour =", "dialog");
    await press(page, "Change", "dialog");
    await shows(page, "column 9");
    await closeToasts();
    await press(page, "Change");
    await enter(page, "selector", "colour = 'red'", "dialog");
    await enter(page, "from_kafka", "true", "dialog");
    await press(page, "Change", "dialog");
    await shows(page, "changed late (revision 2)");
    await shows(page, "colour = 'red'");
    await closeToasts();
    await press(page, "Delete");
    await enter(page, "word", "late", "dialog");
    await press(page, "Delete", "dialog");
    await shows(page, "there is no divert 'late'");
  },
  async "dead letters of pipelines are carried again and discarded"() {
    await goTo(page, "Pipelines");
    await press(page, "Records that pipelines could not carry");
    await shows(page, "bad second");
    await picture(page, "undelivered");
    await chooseFirst();
    await press(page, "Carry again");
    await press(page, "run", "dialog");
    await shows(page, "pending");
    await press(page, "Discard");
    await enter(page, "word", "discard", "dialog");
    await press(page, "discard", "dialog");
    await page.waitForFunction(() => document.querySelector("main").innerText.split("pending").length === 3);
  },
  async "a branch in doubt says what its ends would do"() {
    await goTo(page, "Transactions");
    await shows(page, XID);
    await shows(page, "1 messages are discarded");
    await picture(page, "transactions");
    await press(page, "rollback");
    await enter(page, "word", "rollback", "dialog");
    await press(page, "rollback", "dialog");
    await shows(page, "heuristic-rollback");
    await press(page, "forget");
    await enter(page, "word", "forget", "dialog");
    await press(page, "forget", "dialog");
    await hidesText(page, "heuristic-rollback");
  },
  async "the broker, its settings and permissions"() {
    await goTo(page, "Broker");
    await shows(page, "What keeps the journal");
    await page.waitForFunction(() => /Last snapshot\s+\d{4}-/.test(document.querySelector("main").innerText));
    await shows(page, "Records since");
    await shows(page, "this page");
    await page.waitForFunction(() => /active/.test([...document.querySelectorAll("main tbody tr")].find((row) => row.innerText.includes("this page")).innerText));
    await picture(page, "broker");
    await goTo(page, "Settings");
    await shows(page, "broker.max_message_bytes");
    check(!(await page.evaluate(() => document.body.innerText)).includes("secret"), "settings must not show passwords");
    await shows(page, "Diverts and ingresses that are defined at run time are no settings");
    await picture(page, "settings");
    await goTo(page, "Permissions");
    await enter(page, "user", "eve");
    await enter(page, "address", "flights");
    await press(page, "Ask");
    await shows(page, "allowed: [[permission]] '#'");
    await picture(page, "permissions");
  },
  async "a connection is closed"() {
    await goTo(page, "Connections");
    await shows(page, "watcher");
    await page.evaluate(() => [...document.querySelectorAll("main tbody tr")].find((row) => row.innerText.includes("watcher")).querySelector("a").click());
    await press(page, "Close");
    await press(page, "Close", "dialog");
    await shows(page, "closed 1");
  },
  async "the pages are usable by keyboard, in the dark, and on a phone"() {
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "dark" }]);
    await goTo(page, "Overview");
    await picture(page, "dark");
    await page.setViewport({ width: 390, height: 760, isMobile: true, hasTouch: true });
    await page.reload();
    await shows(page, "Messages a second");
    await page.keyboard.press("Tab");
    await page.keyboard.press("Tab");
    await page.keyboard.press("Enter");
    await page.waitForSelector("nav.open");
    await goTo(page, "Queues");
    await shows(page, "orders.007");
    for (const name of ["Overview", "Queues", "Messages", "Send", "Dead letters", "Pipelines", "Transactions", "Broker", "Settings", "Permissions"]) {
      await goTo(page, name);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
      check(wide <= 0, `${name} is ${wide} pixels too wide for a phone`);
    }
    await goTo(page, "Queues");
    await shows(page, "orders.007");
    await picture(page, "phone");
    await page.setViewport({ width: 1180, height: 760 });
    await page.emulateMediaFeatures([]);
  },
  async "the log-out ends the session"() {
    await press(page, "Log out", "header");
    await shows(page, "Password or token");
    check((await page.evaluate(async () => (await fetch("/overview")).status)) === 401, "the session is over");
  },
  async "a role decides what is shown and possible"() {
    await logIn(page, "vic", "secret");
    await shows(page, "vic (view)");
    const titles = await page.$$eval("nav a", (found) => found.map((each) => each.textContent));
    check(!titles.some((each) => ["Messages", "Send", "Dead letters", "Settings", "Permissions"].includes(each)), `vic sees ${titles}`);
    await page.goto(`${process.env.ADMIN}/console/#/messages?queue=flights`);
    await shows(page, "This page needs the role edit");
    await page.goto(`${process.env.ADMIN}/console/#/queue?name=flights`);
    await shows(page, "Settings of its address");
    check(!(await page.$("main button.danger")), "vic has no dangerous buttons");
    await forbidden("vic", [["GET", "/messages?queue=flights"], ["POST", "/messages/send"], ["POST", "/queues/create"], ["POST", "/queues/purge"]]);
    await press(page, "Log out", "header");
    await shows(page, "Password or token");
    await logIn(page, "eve", "secret");
    await shows(page, "eve (edit)");
    await goTo(page, "Messages");
    const others = await page.$$eval("nav a", (found) => found.map((each) => each.textContent));
    check(others.includes("Send") && !others.includes("Settings") && !others.includes("Permissions"), `eve sees ${others}`);
    await goTo(page, "Pipelines");
    await shows(page, "delayed");
    const buttons = await page.$$eval("main button", (found) => found.map((each) => each.textContent));
    check(buttons.length === 0, `eve has the buttons ${buttons}`);
    await goTo(page, "Transactions");
    check(!(await page.$("main button.danger")), "eve cannot end transactions");
    await forbidden("eve", [["PUT", "/diverts/delayed/pause"], ["POST", "/diverts/delayed/restart"], ["PATCH", "/diverts/delayed/offsets"],
      ["POST", "/diverts"], ["DELETE", "/ingresses/weather"], ["POST", "/connections/close"], ["POST", "/branches/commit"], ["GET", "/settings"],
      ["POST", "/config/reload"]]);
    await press(page, "Log out", "header");
    await shows(page, "Password or token");
  },
};

for (const [name, step] of Object.entries(steps)) {
  try {
    await step();
  } catch (error) {
    await page.screenshot({ path: "failed.png" }).catch(() => null);
    console.error(`failed: ${name}\n${error.stack}\n${faults.join("\n")}`);
    await browser.close();
    process.exit(1);
  }
  console.log(`done: ${name}`);
}
await browser.close();
if (faults.length) {
  console.error(`faults:\n${faults.join("\n")}`);
  process.exit(1);
}
