// The state of pipelines, and the acts of an administrator on them.

import { change, may, post } from "./api.js";
import { attempt, confirmed } from "./dialogs.js";
import { h, link, number } from "./dom.js";
import { grid } from "./table.js";

// Each verb: its method, and what it means. A stop and a restart are asked for first.
const VERBS = {
  pause: ["PUT", "The pipeline carries nothing until it is resumed. The others continue."],
  resume: ["PUT", "The pipeline continues at its position."],
  stop: ["PUT", "The task of the pipeline ends. Its position can be moved then."],
  restart: ["POST", "The task of the pipeline ends and starts again at its position."],
};
const ASKED = ["stop", "restart"];
// The verbs that change something, by what is wanted of a pipeline.
const USEFUL = { running: ["pause", "stop", "restart"], paused: ["resume", "stop"], stopped: ["resume", "pause"], deleted: [] };

export function pathOf(collection, name) {
  return `${collection}/${encodeURIComponent(name)}`;
}

export function verbs(collection, pipeline, done) {
  if (!may("manage")) return [];
  const act = (verb) => async () => {
    const [method, meaning] = VERBS[verb];
    if (ASKED.includes(verb) && !(await confirmed(`${verb} ${pipeline.name}`, meaning, verb))) return;
    await attempt(() => change(method, `${pathOf(collection, pipeline.name)}/${verb}`), () => `${verb}: ${pipeline.name}`);
    done();
  };
  return USEFUL[pipeline.wanted].map((verb) =>
    h("button", { class: ASKED.includes(verb) ? "danger" : null, title: VERBS[verb][1], onclick: act(verb) }, verb));
}

export function stateOf(pipeline) {
  return pipeline.state === pipeline.wanted ? pipeline.state : `${pipeline.state}, ${pipeline.wanted} wanted`;
}

export function pipelineTable(collection, pipelines, done) {
  if (!pipelines.length) return h("p", { class: "muted" }, "There are none.");
  const titles = ["Name", "State", "Defined", "Behind", "Records/s", "Restarts", "Last error", ""];
  return grid(titles, pipelines.map((each) => [
    link("pipeline", { collection, name: each.name }, each.name), stateOf(each), each.origin === "file" ? "in the file" : "at run time",
    number(each.lag), number(each.records_per_s), number(each.restarts), each.error, verbs(collection, each, done),
  ]));
}

// Asks for a plan, shows what it skips and repeats, and confirms exactly this plan. Without a target, the plan is a reset to the start.
export async function movePosition(collection, name, target) {
  const path = `${pathOf(collection, name)}/offsets`;
  const plan = await attempt(() => (target ? change("PATCH", path, target) : change("DELETE", path)), (answer) => `${answer.moves.length} positions would move`);
  if (!plan?.token) return;
  const lines = plan.moves.map((each) => `${each.topic} ${each.partition}: from ${each.offset} to ${each.to}, skips ${number(each.skipped)}, repeats ${number(each.repeated)}`);
  const text = `${lines.join("; ")}.${plan.discards ? " Messages that nothing else has would be LOST." : ""}`;
  if (!(await confirmed(`Move the position of ${name}`, text, "Move", plan.discards ? "discard" : ""))) return;
  await attempt(() => change("PATCH", path, { token: plan.token, discard: plan.discards }), () => `the driver moves the position of ${name}`);
}

export async function deletePipeline(collection, name) {
  const text = collection === "diverts"
    ? "The divert stops, and its position is forgotten. Messages that only this divert wanted and that it has not carried are LOST."
    : "The pipeline stops, and its positions are forgotten. Records that it has not carried stay in their topic.";
  if (!(await confirmed(`Delete ${name}`, text, "Delete", name))) return;
  await attempt(() => change("DELETE", pathOf(collection, name)), () => `deleted ${name}`);
}

export async function createPipeline(collection, name, config) {
  await attempt(() => post(collection, { name, config }), () => `created ${name}`);
}
