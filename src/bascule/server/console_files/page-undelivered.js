// Records that diverts and ingresses could not carry, and what has become of requests to carry them again.

import { act, look, may } from "./api.js";
import { attempt, confirmed } from "./dialogs.js";
import { h, moment, number } from "./dom.js";
import { REDRIVE } from "./requests.js";
import { grid } from "./table.js";

const COUNT = 100;

function jobs(found) {
  if (!found.length) return [];
  return [h("h2", {}, "Requests"), grid(["Request", "By", "At", "State", "Carried", "Failed again", "Discarded", "Left", "Error"],
    found.map((each) => [each.action, each.by, moment(each.at_ms), each.state, number(each.redriven), number(each.failed), number(each.discarded),
      number(each.left), each.error]))];
}

export default {
  title: "Pipeline dead letters",
  hidden: true,
  role: "edit",
  render({ pipeline = "" }) {
    const list = h("div");
    const requests = h("div");
    const chosen = new Set();
    let upto = "";
    let from = "";
    const pages = h("div", { class: "bar" });
    const ask = (verb, meaning, word) => async () => {
      const places = [...chosen];
      const count = places.length ? `${places.length} dead letters` : `all dead letters${pipeline ? ` of ${pipeline}` : ""} that wait`;
      if (!(await confirmed(`${verb} ${count}`, meaning, verb, word))) return;
      const meant = places.length ? { places } : pipeline ? { pipeline } : { all: true };
      await attempt(() => act(REDRIVE[verb], { ...meant, upto, ...(word ? { confirm: true } : {}) }), (answer) => `the driver has the request ${answer.job}`);
      load();
    };
    const row = (each) => {
      const box = h("input", { type: "checkbox", "aria-label": each.place });
      box.addEventListener("change", () => (box.checked ? chosen.add(each.place) : chosen.delete(each.place)));
      return [box, each.place, each.pipeline, `${each.source.topic} ${each.source.partition}:${each.source.offset}`, each.reason, moment(each.time_ms), number(each.redrives)];
    };
    const go = (place) => () => {
      from = place;
      load();
    };
    const load = async () => {
      chosen.clear();
      try {
        const [found, known] = await Promise.all([look(REDRIVE.letters, { count: COUNT, ...(pipeline ? { pipeline } : {}), ...(from ? { from } : {}) }), look(REDRIVE.jobs)]);
        upto = found.upto;
        list.replaceChildren(found.letters.length ? grid(["", "Place", "Pipeline", "Source", "Reason", "Time", "Redrives"], found.letters.map(row))
          : h("p", { class: "muted" }, found.complete ? "No dead letters wait." : "None found yet."),
        h("p", { class: "muted" }, found.complete ? "" : "there are or may be more"));
        pages.replaceChildren(...(from ? [h("button", { onclick: go("") }, "First page")] : []), ...(found.next ? [h("button", { onclick: go(found.next) }, "Next page")] : []));
        requests.replaceChildren(...jobs(known));
      } catch (error) {
        list.replaceChildren(h("p", { class: "error" }, error.message));
      }
    };
    load();
    const acts = may("manage") ? [
      h("button", { onclick: ask("run", "The driver carries them again with the pipelines as they are configured now.", "") }, "Carry again"),
      h("button", { class: "danger", onclick: ask("discard", "They are marked as done and never carried.", "discard") }, "Discard"),
    ] : [];
    const element = h("div", {}, h("p", {}, "Correct the cause before you carry dead letters again: the topic, its permissions, or the pipeline."),
      h("div", { class: "bar" }, acts, h("button", { onclick: load }, "Refresh")), list, pages, requests);
    return { element };
  },
};
