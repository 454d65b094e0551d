// Rates, depth, latency, memory and answer time of the broker, and the lag of its pipelines, live.

import { chart } from "./chart.js";
import { bytes, facts, h, link, number } from "./dom.js";
import { followLag, lag } from "./lag.js";
import { follow, live } from "./live.js";

const milliseconds = (value) => `${number(Math.round(value * 10) / 10)} ms`;
const perSecond = (value) => `${number(Math.round(value * 10) / 10)}/s`;

function tile(title, value, page, parameters) {
  return h("div", { class: "card tile" }, h("span", { class: "muted" }, title), h("b", {}, page ? link(page, parameters, value) : value));
}

function drawn() {
  const { now, points } = live;
  if (now === null) return h("p", { class: "muted" }, live.error || "asking the broker");
  const { sums, gauges, memory } = now;
  return h("div", {},
    h("div", { class: "tiles" },
      tile("Messages waiting", number(sums.messages), "queues", {}), tile("In delivery", number(sums.delivering)),
      tile("Queues", number(gauges.queues ?? 0), "queues", {}), tile("Connections", number(gauges.connections), "connections", {}),
      tile("Consumers", number(sums.consumers)), tile("Dead letters", number(now.dead_letters), "dead-letters", {}),
      tile("In doubt", number(gauges.branches_prepared ?? 0), "transactions", {}), tile("Memory", memory ? bytes(memory.used_bytes) : "–", "brokers", {})),
    memory?.blocked ? h("p", { class: "error" }, `producers wait: ${memory.blocked}`) : null,
    h("div", { class: "charts" },
      chart("Messages a second", ["in", "out", "acknowledged"], points.map((p) => [p.ms, p.rates.in, p.rates.out, p.rates.acknowledged]), perSecond),
      chart("Depth", ["waiting", "in delivery", "delayed"], points.map((p) => [p.ms, p.sums.messages, p.sums.delivering, p.sums.delayed]), number),
      chart("Latency: a persistent message until it is accepted", ["p50", "p99"], points.map((p) => [p.ms, ...p.sendMs]), milliseconds),
      chart("Lag of pipelines: records behind", ["diverts", "ingresses"], lag.points, number),
      chart("Memory", ["used"], points.map((p) => [p.ms, p.memory ? p.memory.used_bytes : null]), bytes),
      chart("Answer time of the admin server", ["answer"], points.map((p) => [p.ms, p.answerMs]), milliseconds),
      chart("On the way to the journal", ["bytes"], points.map((p) => [p.ms, p.inFlight]), bytes),
      chart("Dead letters a second", ["moved"], points.map((p) => [p.ms, p.rates.dead]), perSecond)),
    facts([["Bridge", now.bridge], ["Version", `${now.version}, ${now.build}`], ["State", now.state], ["Reason", now.reason],
      ["Epoch", number(gauges.epoch)]]));
}

export default {
  title: "Overview",
  render() {
    const element = h("div", {}, drawn());
    const draw = () => element.replaceChildren(drawn());
    const ends = [follow(draw), followLag(draw)];
    return { element, end: () => ends.forEach((end) => end()) };
  },
};
