// Diverts and ingresses: the flow of messages, and the state of each pipeline.

import { get, may } from "./api.js";
import { asked } from "./dialogs.js";
import { h, link } from "./dom.js";
import { drawing } from "./flow-drawing.js";
import { createIngress, pipelineTable } from "./pipeline-verbs.js";

const REFRESH_MS = 3000;
const KINDS = [["diverts", "Diverts"], ["ingresses", "Ingresses"]];

const FIELDS = [
  { name: "name", label: "Name", attributes: { required: true } },
  { name: "topics", label: "Topics of Kafka, with commas between them", attributes: { required: true } },
  { name: "to", label: "Destination: queue://NAME or topic://NAME", attributes: { required: true } },
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
        const now = await get("flow");
        flow.replaceChildren(drawing(now, before, REFRESH_MS),
          h("p", { class: "muted" }, "By the settings of this broker. The lag is that of the last snapshot of the journal."));
        before = now;
      } catch (error) {
        flow.replaceChildren(failure(error));
      }
    };
    const list = async () => {
      try {
        const found = await Promise.all(KINDS.map(([collection]) => get(collection)));
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
    const create = async () => {
      const answer = await asked("Create an ingress", FIELDS, "Create");
      if (answer) await createIngress(answer.name.trim(), { topics: answer.topics.split(",").map((each) => each.trim()), to: answer.to.trim() });
      load();
    };
    load();
    const element = h("div", {}, flow, may("manage") ? h("div", { class: "bar" }, h("button", { onclick: create }, "Create an ingress")) : null, tables,
      h("p", {}, link("undelivered", {}, "Records that pipelines could not carry")));
    return { element, end: () => { over = true; clearTimeout(timer); } };
  },
};
