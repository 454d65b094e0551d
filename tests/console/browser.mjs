// A browser, and steps in it: each waits for what it needs, and fails with its name.

import puppeteer from "puppeteer-core";

export const WAIT_MS = Number(process.env.WAIT_MS ?? 30000);
const ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-zygote", "--hide-scrollbars", "--font-render-hinting=none"];

export async function started() {
  // A public key that the browser trusts without the certificate of its authority: base64 of its SHA-256 hash.
  const trusted = process.env.TRUSTED_KEY ? [`--ignore-certificate-errors-spki-list=${process.env.TRUSTED_KEY}`] : [];
  const args = [...ARGUMENTS, ...trusted];
  const browser = await puppeteer.launch({ executablePath: process.env.CHROMIUM, args, headless: "shell", protocolTimeout: 4 * WAIT_MS });
  const page = await browser.newPage();
  page.setDefaultTimeout(WAIT_MS);
  const faults = [];
  page.on("pageerror", (error) => faults.push(`error of a script: ${error.message}`));
  page.on("dialog", async (dialog) => {
    faults.push(`a dialog of the browser: ${dialog.message()}`);
    await dialog.dismiss();
  });
  page.on("console", (message) => {
    if (message.type() === "error" && !message.text().includes("Failed to load resource")) faults.push(`console: ${message.text()}`);
  });
  page.on("request", (request) => {
    if (!request.url().startsWith(process.env.ADMIN) && !request.url().startsWith("about:")) faults.push(`foreign request: ${request.url()}`);
  });
  return { browser, page, faults };
}

export function check(condition, what) {
  if (!condition) throw new Error(what);
}

// Waits until the page shows a text.
export async function shows(page, text) {
  try {
    await page.waitForFunction((wanted) => document.body.innerText.includes(wanted), {}, text);
  } catch {
    throw new Error(`the page ${page.url()} never showed ${JSON.stringify(text)}, but:\n${await page.evaluate(() => document.body.innerText)}`);
  }
}

export async function hidesText(page, text) {
  await page.waitForFunction((wanted) => !document.querySelector("main").innerText.includes(wanted), {}, text);
}

// Opens a page of the console by the navigation.
export async function goTo(page, title) {
  const found = await page.evaluateHandle((wanted) => [...document.querySelectorAll("nav a")].find((each) => each.textContent === wanted), title);
  check(found.asElement(), `the navigation has no page ${title}`);
  await found.asElement().evaluate((each) => each.click());
  await page.waitForFunction((wanted) => document.querySelector("main h1")?.textContent === wanted, {}, title);
}

export async function press(page, text, within = "main") {
  // A page that is still loading hides the buttons that do not work yet.
  const find = (place, wanted) =>
    [...document.querySelectorAll(`${place} button, ${place} a`)].find((each) => each.textContent.trim() === wanted && each.checkVisibility());
  const found = await page.waitForFunction(find, {}, within, text).catch(() => {
    throw new Error(`${page.url()} has no button ${text} within ${within}`);
  });
  await found.asElement().evaluate((each) => each.click());
}

export async function enter(page, name, value, within = "main") {
  const selector = `${within} [name="${name}"]`;
  await page.waitForSelector(selector);
  await page.$eval(selector, (field, text) => {
    field.value = text;
    field.dispatchEvent(new Event("input", { bubbles: true }));
    field.dispatchEvent(new Event("change", { bubbles: true }));
  }, value);
}

export async function logIn(page, user, password) {
  await page.goto(`${process.env.ADMIN}/console/`);
  await enter(page, "user", user);
  await enter(page, "password", password);
  await press(page, "Log in");
}

export async function picture(page, name) {
  if (!process.env.PICTURES) return;
  await page.evaluate(() => document.querySelectorAll("#toasts .toast").forEach((each) => each.remove()));
  await page.screenshot({ path: `${process.env.PICTURES}/${name}.webp`, type: "webp", quality: 75 });
}
