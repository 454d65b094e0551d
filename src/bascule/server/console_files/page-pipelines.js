// Diverts and ingresses: the flow of messages, and the state of each pipeline.

import { look, may } from "./api.js";
import { h, link } from "./dom.js";
import { drawing } from "./flow-drawing.js";
import { createPipeline, pipelineTable } from "./pipeline-verbs.js";
import { BROKER, PIPELINES } from "./requests.js";

const REFRESH_MS = 3000;
const KINDS = [["diverts", "Diverts"], ["ingresses", "Ingresses"]];

function failure(error) {
  return h("p", { class: "error" }, error.message);
}

export default {
  title: "Pipelines",
  render() {
    const flow = h("div");
    const tables = h("div");
    let timer = null;
    let over = false;
    let before = null;
    const draw = async () => {
      try {
        const now = await look(BROKER.flow);
        const about = "Records a second and lag are those of the last report of the driver. A dashed frame: defined at run time.";
        flow.replaceChildren(drawing(now, before, REFRESH_MS), h("p", { class: "muted" }, about),
          now.trouble ? h("p", { class: "error" }, `States, and pipelines that are defined at run time, are missing: ${now.trouble}`) : "");
        before = now;
      } catch (error) {
        flow.replaceChildren(failure(error));
      }
    };
    const list = async () => {
      try {
        const found = await Promise.all(KINDS.map(([collection]) => look(PIPELINES[collection].list)));
        tables.replaceChildren(...KINDS.flatMap(([collection, title], index) => [h("h2", {}, title), pipelineTable(collection, found[index], load)]));
      } catch (error) {
        tables.replaceChildren(failure(error));
      }
    };
    const load = async () => {
      clearTimeout(timer);
      await Promise.all([draw(), list()]);
      if (!over) timer = setTimeout(load, REFRESH_MS);
    };
    const create = (collection, title) => async () => {
      await createPipeline(collection, title);
      load();
    };
    load();
    const element = h("div", {}, flow, may("manage") ? h("div", { class: "bar" }, h("button", { onclick: create("diverts", "Create a divert") }, "Create a divert"),
      h("button", { onclick: create("ingresses", "Create an ingress") }, "Create an ingress")) : null, tables,
      h("p", {}, link("undelivered", {}, "Records that pipelines could not carry")));
    return { element, end: () => { over = true; clearTimeout(timer); } };
  },
};
