// What happened to a message: its events, where it is now, and what is not recorded.

import { look } from "./api.js";
import { address, h, moment } from "./dom.js";
import { followLife } from "./life-follow.js";
import { MESSAGES } from "./requests.js";
import { grid } from "./table.js";

const HOUR_S = 3_600;
const PERIODS = [["the last hour", HOUR_S], ["the last day", 24 * HOUR_S], ["the last week", 168 * HOUR_S], ["the whole journal", 0]];

function record(divert) {
  return divert.offset >= 0 ? `${divert.topic}-${divert.partition} offset ${divert.offset}` : "";
}

function deliveries(stay) {
  if (stay.failed_deliveries) return `${stay.failed_deliveries} failed`;
  if (stay.may_have_been_delivered === null) return "unknown";
  return stay.may_have_been_delivered ? "perhaps delivered" : "not delivered";
}

function drawn(life) {
  const queues = life.messages.flatMap((each) => each.queues.map((stay) => [each.message, stay.queue, stay.state, deliveries(stay), stay.copy]));
  const diverts = life.messages.flatMap((each) => each.diverts.map((found) => [each.message, found.divert, found.state, record(found), found.detail]));
  const ids = new Set(life.messages.map((each) => each.id)).size > 1 ? life.messages.map((each) => [each.message, each.id]) : [];
  const branches = life.branches.map((each) => [each.xid, each.client, each.outcome]);
  return [
    h("h2", {}, "Events"),
    life.events.length
      ? grid(["Time", "Event", "Message", "Queue", "Detail"], life.events.map((each) => [moment(each.time_ms), each.what, each.message, each.queue, each.detail]))
      : h("p", { class: "muted" }, "none"),
    queues.length ? [h("h2", {}, "Queues"), grid(["Message", "Queue", "State", "Deliveries", "Copy"], queues)] : null,
    ids.length ? [h("h2", {}, "Ids"), grid(["Message", "JMSMessageID"], ids)] : null,
    diverts.length ? [h("h2", {}, "Diverts"), grid(["Message", "Divert", "State", "Record", "Detail"], diverts)] : null,
    branches.length ? [h("h2", {}, "Transactions"), grid(["Transaction", "Client", "Outcome"], branches)] : null,
    h("h2", {}, "Not read or not recorded"),
    h("ul", {}, life.unrecorded.map((each) => h("li", {}, each))),
  ].flat(Infinity).filter((each) => each !== null);
}

export default {
  title: "Message life",
  role: "edit",
  render({ id = "", period = String(24 * HOUR_S), follow = "" }) {
    const input = h("input", { name: "id", value: id, required: true, spellcheck: "false" });
    const since = h("select", { name: "period" }, PERIODS.map(([title, seconds]) => h("option", { value: seconds, selected: String(seconds) === period }, title)));
    const following = h("input", { type: "checkbox", name: "follow", checked: follow === "true", onchange: () => {
      if (id && following.checked) ask();
      else progress.textContent = "";
    } });
    const progress = h("p", { class: "muted", role: "status" });
    const answer = h("div", {});
    let asking = new AbortController();
    let shown = "";
    const ask = () => {
      asking.abort();  // the broker ends a search whose client leaves
      const { signal } = asking = new AbortController();
      progress.textContent = "Searching…";
      answer.replaceChildren();
      shown = "";
      followLife({
        signal,
        follows: () => following.checked,
        search: () => look(MESSAGES.life, { id, last_s: period }, { signal }),
        show: (life, again) => {
          progress.textContent = again ? "Following. The broker searches again after a pause." : following.checked ? "The message has ended." : "";
          const text = JSON.stringify({ ...life, journal: null });
          if (text !== shown) answer.replaceChildren(...drawn(life));  // otherwise a selection in it stays
          shown = text;
        },
        fail: (error) => progress.replaceChildren(h("span", { class: "error" }, error.message)),
      });
    };
    const go = (event) => {
      event.preventDefault();
      const wanted = address("life", { id: input.value, period: since.value, follow: following.checked ? "true" : "" });
      if (wanted === location.hash) ask();
      else location.hash = wanted;
    };
    if (id) ask();
    const element = h("div", {},
      h("p", {}, "Shows what the journal, the target topics and the audit topic record about a message. Nothing is changed."),
      h("form", { class: "card form", onsubmit: go }, h("label", {}, "Message id (JMSMessageID)", input), h("label", {}, "Search", since),
        h("label", { class: "check" }, following, "Follow until the message has ended"),
        h("button", { class: "primary" }, "Search")),
      progress, answer);
    return { element, end: () => asking.abort() };
  },
};
