// The figures of the broker, asked for again and again, and their history.

import { look as ask } from "./api.js";
import { BROKER } from "./requests.js";

export const INTERVAL_MS = 2000;
const HISTORY = 300; // points: ten minutes
const RATES = { in: "messages_in", out: "messages_out", acknowledged: "messages_acknowledged", dead: "messages_dead_lettered" };

export const live = { now: null, points: [], error: "" };
const listeners = new Set();
let timer = null;
let before = null;

export function follow(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function start() {
  if (timer === null) look();
}

export function stop() {
  clearTimeout(timer);
  timer = before = null;
}

async function look() {
  timer = setTimeout(look, INTERVAL_MS);
  if (document.hidden && live.now !== null) return;
  const begun = performance.now();
  try {
    const now = await ask(BROKER.overview);
    live.error = "";
    take(now, performance.now() - begun);
  } catch (error) {
    live.error = error.message;
  }
  for (const listener of listeners) listener();
}

// The time in ms that this share of the values of a histogram does not exceed, as Prometheus estimates it; null without values.
function quantileMs(bounds, counts, share) {
  const sum = counts.reduce((one, other) => one + other, 0);
  if (sum <= 0 || Math.min(...counts) < 0) return null;
  let rank = share * sum;
  for (let index = 0; index < bounds.length; index += 1) {
    const lower = index ? bounds[index - 1] : 0;
    if (counts[index] && rank <= counts[index]) return 1000 * (lower + ((bounds[index] - lower) * rank) / counts[index]);
    rank -= counts[index];
  }
  return 1000 * bounds.at(-1);
}

function take(now, answerMs) {
  const seconds = before === null ? 0 : (now.time_ms - before.time_ms) / 1000;
  const restarted = before !== null && now.counters.messages_in < before.counters.messages_in;
  const rates = Object.fromEntries(Object.entries(RATES).map(([name, counter]) => [
    name, seconds > 0 && !restarted ? (now.counters[counter] - before.counters[counter]) / seconds : null,
  ]));
  const waits = before === null ? [] : now.sends.counts.map((count, index) => count - before.sends.counts[index]);
  const sendMs = [0.5, 0.99].map((share) => quantileMs(now.sends.bounds_s, waits, share));
  live.points.push({ ms: now.time_ms, rates, answerMs, sendMs, sums: now.sums, memory: now.memory, inFlight: now.gauges.journal_in_flight_bytes ?? 0 });
  if (live.points.length > HISTORY) live.points.shift();
  live.now = before = now;
}
