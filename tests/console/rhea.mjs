// Opens pages in the browser, and runs exchanges in each: VISITS is a list of {page, exchanges}. The output is a list of lists of results.

import { started } from "./browser.mjs";

const { browser, page } = await started();
try {
  const visits = [];
  for (const visit of JSON.parse(process.env.VISITS)) {
    await page.goto(visit.page);
    await page.waitForFunction(() => window.exchange !== undefined);
    const results = [];
    for (const each of visit.exchanges) results.push(await page.evaluate((wanted) => window.exchange(wanted), each));
    visits.push(results);
  }
  console.log(JSON.stringify(visits));
} finally {
  await browser.close();
}
