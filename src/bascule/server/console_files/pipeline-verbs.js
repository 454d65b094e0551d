// The state of pipelines, and the acts of an administrator on them.

import { act, may } from "./api.js";
import { asked, attempt, confirmed } from "./dialogs.js";
import { behind, h, latency, link, moment, number } from "./dom.js";
import { definitionOf, FIELDS, filled, FIRST } from "./pipeline-fields.js";
import { PIPELINES } from "./requests.js";
import { grid } from "./table.js";

// Each verb, and what it means. A stop and a restart are asked for first.
const VERBS = {
  pause: "The pipeline carries nothing until it is resumed. The others continue.",
  resume: "The pipeline continues at its position.",
  stop: "The task of the pipeline ends. Its position can be moved then.",
  restart: "The task of the pipeline ends and starts again at its position.",
};
const ASKED = ["stop", "restart"];
// The verbs that change something, by what is wanted of a pipeline. Each of them replaces a damaged record of what is wanted.
const USEFUL = {
  running: ["pause", "stop", "restart"], paused: ["resume", "stop"], stopped: ["resume", "pause"], unreadable: ["resume", "pause", "stop"], deleted: [],
};

export function verbs(collection, pipeline, done) {
  if (!may("manage")) return [];
  const run = (verb) => async () => {
    if (ASKED.includes(verb) && !(await confirmed(`${verb} ${pipeline.name}`, VERBS[verb], verb))) return;
    await attempt(() => act(PIPELINES[collection][verb], {}, { names: { name: pipeline.name } }), () => `${verb}: ${pipeline.name}`);
    done();
  };
  return USEFUL[pipeline.wanted].map((verb) =>
    h("button", { class: ASKED.includes(verb) ? "danger" : null, title: VERBS[verb], onclick: run(verb) }, verb));
}

export function stateOf(pipeline) {
  return pipeline.state === pipeline.wanted ? pipeline.state : `${pipeline.state}, ${pipeline.wanted} wanted`;
}

export function pipelineTable(collection, pipelines, done) {
  if (!pipelines.length) return h("p", { class: "muted" }, "There are none.");
  const titles = ["Name", "State", "Defined", "Behind", "Records/s", "Latency p50 / p99", "Restarts", "Last error", ""];
  return grid(titles, pipelines.map((each) => [
    link("pipeline", { collection, name: each.name }, each.name), stateOf(each), each.origin === "file" ? "in the file" : "at run time",
    behind(each), number(each.records_per_s), latency(each), number(each.restarts), each.error, verbs(collection, each, done),
  ]));
}

// Asks for a plan, shows what it skips and repeats, and confirms exactly this plan. Without a target, the plan is a reset to the start.
export async function movePosition(collection, name, target) {
  const { move, reset } = PIPELINES[collection];
  const names = { name };
  const plan = await attempt(() => (target ? act(move, target, { names }) : act(reset, {}, { names })), (answer) => `${answer.moves.length} positions would move`);
  if (!plan?.token) return;
  const lines = plan.moves.map((each) => `${each.topic} ${each.partition}: from ${each.offset} to ${each.to}, skips ${number(each.skipped)}, repeats ${number(each.repeated)}`);
  const text = `${lines.join("; ")}.${plan.discards ? " Messages that nothing else has would be LOST." : ""}`;
  if (!(await confirmed(`Move the position of ${name}`, text, "Move", plan.discards ? "discard" : ""))) return;
  await attempt(() => act(move, { token: plan.token, discard: plan.discards }, { names }), () => `asked the driver to move the position of ${name}`);
}

// What became of the last request to move positions: the driver applies it, or refuses it and says why.
export function moveOutcome(request) {
  if (request === null) return "";
  const said = {
    pending: "accepted; the driver has not handled it yet", done: "applied: the positions have moved", refused: `refused, nothing has moved: ${request.error}`,
  };
  return `${said[request.state]} (asked by ${request.by}, ${moment(request.at_ms)})`;
}

export async function deletePipeline(collection, name) {
  const text = collection === "diverts"
    ? "The divert stops, and its position is forgotten. Messages that only this divert wanted and that it has not carried are LOST."
    : "The pipeline stops, and its positions are forgotten. Records that it has not carried stay in their topic.";
  if (!(await confirmed(`Delete ${name}`, text, "Delete", name))) return;
  await attempt(() => act(PIPELINES[collection].delete, {}, { names: { name } }), () => `deleted ${name}`);
}

export async function createPipeline(collection, title) {
  const fields = [...FIRST, ...FIELDS[collection]];
  const answer = await asked(title, fields, "Create");
  if (!answer) return;
  const { name, ...config } = definitionOf(fields, answer);
  await attempt(() => act(PIPELINES[collection].create, { name, config }), () => `created ${name}`);
}

// `shown` is the definition as it was shown: a change that somebody else has made since is not overwritten.
export async function changePipeline(collection, shown) {
  const { name } = shown;
  const fields = FIELDS[collection];
  const answer = await asked(`Change ${name}`, filled(fields, shown.config ?? shown.definition ?? {}), "Change");
  if (!answer) return;
  const config = definitionOf(fields, answer, shown.config ?? {});
  const query = { revision: shown.revision ?? 0 };
  await attempt(() => act(PIPELINES[collection].change, config, { names: { name }, query }), ({ revision }) => `changed ${name} (revision ${revision})`);
}
