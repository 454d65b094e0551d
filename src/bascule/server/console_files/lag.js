// How far the pipelines are behind, asked for while a page shows it, and its history.

import { look } from "./api.js";
import { BROKER } from "./requests.js";

const INTERVAL_MS = 5000; // a driver reports as often
const HISTORY = 120; // points: ten minutes

export const lag = { points: [] };

// The records of pipelines of a kind together; null if nobody has reported.
function sum(pipelines) {
  const known = pipelines.map((each) => each.lag).filter((each) => each !== null);
  return known.length ? known.reduce((one, other) => one + other, 0) : null;
}

export function followLag(listener) {
  let timer = null;
  let over = false;
  const ask = async () => {
    try {
      if (!document.hidden) {
        const { diverts, ingresses } = await look(BROKER.flow);
        lag.points.push([Date.now(), sum(diverts), sum(ingresses)]);
        if (lag.points.length > HISTORY) lag.points.shift();
        if (!over) listener();
      }
    } catch {
      // the page shows that the broker does not answer
    }
    if (!over) timer = setTimeout(ask, INTERVAL_MS);
  };
  ask();
  return () => { over = true; clearTimeout(timer); };
}
