// This broker: role, epoch, journal, memory, and what the journal is kept for; and the other brokers of the journal.

import { look } from "./api.js";
import { bytes, facts, h, moment, number } from "./dom.js";
import { follow, live } from "./live.js";
import { BROKER } from "./requests.js";
import { grid } from "./table.js";

const REFRESH_MS = 5000;

function pins(found) {
  if (!found.length) return h("p", { class: "muted" }, "nothing is known before the first snapshot");
  const titles = ["Kept by", "Name", "From offset", "Records", "Size", "Reason"];
  const rows = [...found].sort((a, b) => a.offset - b.offset);
  return grid(titles, rows.map((each) => [each.keeper, each.name, number(each.offset), number(each.records), bytes(each.bytes),
    each.released ? `released: ${each.reason}` : each.reason]));
}

// The last snapshot, from which a broker starts, and the records that it would read after it.
function snapshots(gauges, found) {
  const made = gauges.snapshot_timestamp_seconds > 0;
  const later = found.find((each) => each.keeper === "snapshot");
  return [["Last snapshot", made ? moment(gauges.snapshot_timestamp_seconds * 1000) : "none in this epoch yet"], ["Size", made ? bytes(gauges.snapshot_bytes) : ""],
    ["Records since", later ? number(later.records) : ""], ["Journal since", later ? bytes(later.bytes) : ""]];
}

function drawn() {
  const { now } = live;
  if (now === null) return [h("p", { class: "muted" }, live.error || "asking the broker")];
  const { gauges, memory } = now;
  return [
    facts([["Role", now.serving ? "active" : now.reason || now.state], ["Bridge", now.bridge], ["Version", `${now.version}, ${now.build}`],
      ["Watches the active broker", now.serving ? "" : gauges.watches_elected ? "yes" : "no"]]),
    h("h2", {}, "Journal"),
    facts([["Epoch", number(gauges.epoch)], ["Offset", number(gauges.journal_offset)], ["Sequence", number(gauges.journal_sequence)],
      ["Not stored yet", bytes(gauges.journal_in_flight_bytes)], ["Foreign records", number(gauges.journal_foreign_records)]]),
    h("h2", {}, "Snapshots"), facts(snapshots(gauges, now.pins)),
    h("h2", {}, "What keeps the journal, as of the last snapshot"), pins(now.pins),
    h("h2", {}, "Memory"),
    memory ? facts([["Used", bytes(memory.used_bytes)], ["Limit", bytes(memory.limit_bytes)], ["Bodies in spill files", bytes(memory.spilled_bytes)],
      ["Spill files", bytes(memory.spill_bytes)], ["Producers wait", memory.blocked],
      ...Object.entries(memory.parts).map(([name, value]) => [name, bytes(value)])]) : "",
    h("h2", {}, "Counters since the start"), facts(Object.entries(now.counters).map(([name, value]) => [name.replaceAll("_", " "), number(value)])),
  ];
}

function table(found) {
  return grid(["Broker", "Reaches Kafka from", "Role", ""],
    found.map((each) => [each.name, each.host, each.elected ? "active" : "standby", each.this ? "this page" : ""]));
}

export default {
  title: "Broker",
  render() {
    const one = h("div", {}, drawn());
    const all = h("div");
    let timer = null;
    let over = false;
    const load = async () => {
      try {
        all.replaceChildren(table(await look(BROKER.brokers)));
      } catch (error) {
        all.replaceChildren(h("p", { class: "error" }, error.message));
      }
      if (!over) timer = setTimeout(load, REFRESH_MS);
    };
    load();
    const end = follow(() => one.replaceChildren(...drawn()));
    const element = h("div", {}, h("h2", {}, "Brokers of the journal"), all, h("h2", {}, "This broker"), one);
    return { element, end: () => { over = true; clearTimeout(timer); end(); } };
  },
};
