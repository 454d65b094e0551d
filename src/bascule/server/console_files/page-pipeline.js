// One divert or ingress: its definition, its positions, and what an administrator can do.

import { look, may } from "./api.js";
import { asked } from "./dialogs.js";
import { behind, facts, h, latency, moment, number } from "./dom.js";
import { changePipeline, deletePipeline, moveOutcome, movePosition, stateOf, verbs } from "./pipeline-verbs.js";
import { PIPELINES } from "./requests.js";
import { grid } from "./table.js";

const REFRESH_MS = 3000;
// A request to move positions is looked at in each refresh while it is pending, and otherwise in each of this number: Kafka is asked for it.
const MOVE_REFRESHES = 10;

function positions(sources) {
  const titles = ["Topic", "Partition", "Next offset", "End", "Behind"];
  return grid(titles, sources.map((each) => [each.topic, each.partition, number(each.offset), number(each.end),
    each.end === null ? "" : number(each.end - each.offset)]));
}

// A number is an offset; the words and times are those of the command line.
function targetOf(text) {
  return { to: /^\d+$/.test(text) ? Number(text) : text };
}

export default {
  title: "Pipeline",
  hidden: true,
  render({ collection = "diverts", name = "" }) {
    const element = h("div");
    let timer = null;
    let over = false;
    let moved = null;
    let refreshes = 0;
    const move = async () => {
      const field = { name: "to", label: "To: earliest, latest, an offset, or a time such as 2026-01-31T08:00:00Z", attributes: { required: true } };
      const answer = await asked(`Move the position of ${name}`, [field], "Show what it means");
      if (answer) await movePosition(collection, name, targetOf(answer.to.trim()));
      refreshes = 0;
      load();
    };
    const reset = async () => {
      await movePosition(collection, name, null);
      refreshes = 0;
      load();
    };
    const change = (shown) => async () => {
      await changePipeline(collection, shown);
      load();
    };
    const remove = async () => {
      await deletePipeline(collection, name);
      load();
    };
    const show = ([status, shown]) => {
      const known = { ...shown.definition, ...shown.config };
      const changes = may("manage") ? [
        ...verbs(collection, status, load), h("button", { onclick: move }, "Move the position"),
        h("button", { onclick: reset, title: "To where the setting start says, as a new pipeline begins" }, "Reset the position"),
        ...(shown.origin === "file" ? [] : [
          // Without the stored definition, a change would drop the settings that the form does not have.
          shown.config ? h("button", { onclick: change(shown) }, "Change") : null,
          h("button", { class: "danger", onclick: remove }, "Delete"),
        ]),
      ] : [];
      element.replaceChildren(
        facts([
          ["Name", status.name], ["Kind", status.kind], ["State", stateOf(status)], ["Wanted by", status.wanted_by],
          ["Group", status.group], ["Behind", behind(status)], ["Records/s", number(status.records_per_s)],
          ["Latency p50 / p99", latency(status)],
          ["Restarts", number(status.restarts)], ["Last error", status.error], ["At", moment(status.error_at_ms)],
          ["Driver", status.driver], ["Reported", moment(status.reported_at_ms)], ["Last move of the position", moved],
        ]),
        h("div", { class: "bar" }, changes), h("h2", {}, "Positions"), positions(status.sources),
        h("h2", {}, shown.origin === "file" ? "Definition in the configuration file" : "Definition made at run time"),
        facts(Object.entries(known).map(([key, value]) => [key, typeof value === "string" ? value : JSON.stringify(value)])));
    };
    const lookForMove = async () => {
      if (refreshes++ % MOVE_REFRESHES) return;
      try {
        const { request } = await look(PIPELINES[collection].positions, {}, { names: { name } });
        if (request?.state === "pending") refreshes = 0;
        moved = moveOutcome(request);
      } catch (error) {
        moved = `not known: ${error.message}`;
      }
    };
    const load = async () => {
      clearTimeout(timer);
      try {
        const { show: definition, status } = PIPELINES[collection];
        show(await Promise.all([look(status, {}, { names: { name } }), look(definition, {}, { names: { name } }), lookForMove()]));
      } catch (error) {
        element.replaceChildren(h("p", { class: "error" }, error.message));
      }
      if (!over) timer = setTimeout(load, REFRESH_MS);
    };
    load();
    return { element, end: () => { over = true; clearTimeout(timer); } };
  },
};
