// Diverts and ingresses: the flow of messages, and the state of each pipeline.

import { look, may } from "./api.js";
import { asked } from "./dialogs.js";
import { h, link } from "./dom.js";
import { drawing } from "./flow-drawing.js";
import { createPipeline, pipelineTable } from "./pipeline-verbs.js";
import { BROKER, PIPELINES } from "./requests.js";

const REFRESH_MS = 3000;
const KINDS = [["diverts", "Diverts"], ["ingresses", "Ingresses"]];

const INGRESS_FIELDS = [
  { name: "name", label: "Name", attributes: { required: true } },
  { name: "topics", label: "Topics of Kafka, with commas between them", attributes: { required: true } },
  { name: "to", label: "Destination: queue://NAME or topic://NAME", attributes: { required: true } },
];

const DIVERT_FIELDS = [
  { name: "name", label: "Name", attributes: { required: true } },
  { name: "from", label: "From: an address; * stands for one word, # for any number of words", attributes: { required: true } },
  { name: "selector", label: "Selector; empty for every message" },
  { name: "to", label: "To: a topic of Kafka", attributes: { required: true } },
];

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
    const createIngress = async () => {
      const answer = await asked("Create an ingress", INGRESS_FIELDS, "Create");
      if (answer) await createPipeline("ingresses", answer.name.trim(), { topics: answer.topics.split(",").map((each) => each.trim()), to: answer.to.trim() });
      load();
    };
    const createDivert = async () => {
      const answer = await asked("Create a divert", DIVERT_FIELDS, "Create");
      if (answer) await createPipeline("diverts", answer.name.trim(), { from: answer.from.trim(), selector: answer.selector.trim(), to: answer.to.trim() });
      load();
    };
    load();
    const element = h("div", {}, flow, may("manage") ? h("div", { class: "bar" }, h("button", { onclick: createDivert }, "Create a divert"),
      h("button", { onclick: createIngress }, "Create an ingress")) : null, tables,
      h("p", {}, link("undelivered", {}, "Records that pipelines could not carry")));
    return { element, end: () => { over = true; clearTimeout(timer); } };
  },
};
