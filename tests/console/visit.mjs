// Opens pages of the console, and waits until each of them shows its texts; spaces and line breaks are alike. VISITS is a list of {title, path, texts}:
// a page of the navigation has no path.

import { enter, goTo, press, started, WAIT_MS } from "./browser.mjs";

const { browser, page, faults } = await started();

async function shown(text) {
  const found = (wanted) => document.querySelector("main").innerText.replace(/\s+/g, " ").includes(wanted);
  await page.waitForFunction(found, { timeout: WAIT_MS }, text).catch(async () => {
    throw new Error(`${page.url()} never showed ${JSON.stringify(text)}, but:\n${await page.evaluate(() => document.querySelector("main").innerText)}`);
  });
}

try {
  await page.goto(`${process.env.ADMIN}/console/`);
  if (process.env.TOKEN) {
    await enter(page, "password", process.env.TOKEN);
    await press(page, "Log in");
  }
  await page.waitForSelector("nav a");
  for (const { title, path, texts } of JSON.parse(process.env.VISITS)) {
    if (path) await page.goto(`${process.env.ADMIN}/console/#/${path}`);
    else await goTo(page, title);
    await page.waitForFunction((wanted) => document.querySelector("main h1")?.textContent === wanted, {}, title);
    for (const text of texts) await shown(text);
  }
} catch (error) {
  console.error(`${error.stack}\n${faults.join("\n")}`);
  process.exitCode = 1;
}
await browser.close();
