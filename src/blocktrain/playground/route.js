// The picture of the route: hosts as boxes, the lines between them with what they cost.

import { NONE, bytes, el, keyed, known, put } from "./words.js";

export const ms = (value) => {
  if (!known(value)) return NONE;
  return `${value < 9.95 ? value.toFixed(1) : Math.round(value).toLocaleString("en")}\u00a0ms`;
};
export const blocksOf = ({ first, last }) =>
  first === last ? `block ${first + 1}` : `blocks ${first + 1}–${last + 1}`;
const short = (id) => id.slice(0, 8);
const at = (node, name) => node.querySelector(`.${name}`);

// The stages a traversal goes through: those of the last one, or, before there was any, one after
// another until every block is covered, the nearest where there is a choice.
function taken(route, legs) {
  const there = new Map(route.stages.map((stage) => [stage.stage, stage]));
  const last = legs.filter((leg) => leg.stage !== null).map((leg) => there.get(leg.stage));
  if (last.length > 0 && last.every((stage) => stage !== undefined)) return last;
  const used = [];
  for (let block = 0; block < route.blocks; block = used.at(-1).last + 1) {
    const next = route.stages
      .filter((stage) => stage.first === block)
      .sort((a, b) => a.rtt_ms - b.rtt_ms)[0];
    if (next === undefined) return [...used, { missing: true, first: block, last: route.blocks - 1 }];
    used.push(next);
  }
  return used;
}

// Everything along the way: the gateway, a line, a stage, a line, …, and the gateway again.
function along(route, legs) {
  const used = taken(route, legs);
  const legTo = new Map(legs.map((leg) => [leg.stage, leg]));
  const way = [{ key: "gateway", kind: "host", name: "Gateway", where: "where your prompt enters" }];
  for (const [n, stage] of used.entries()) {
    const leg = legTo.get(stage.stage);
    // Between stages, what the one before has measured; unknown until something went that way.
    const rtt = n === 0 ? stage.rtt_ms : (leg?.rtt_ms ?? used[n - 1].onward_ms?.[stage.stage]);
    way.push({ key: `to ${stage.stage}`, kind: "line", leg, rtt });
    way.push({ key: `at ${stage.stage}`, kind: "host", stage, leg, spares: sparesOf(route, stage) });
  }
  const leg = legTo.get(null);
  way.push({ key: "back", kind: "line", leg, rtt: used.at(-1)?.rtt_ms });
  way.push({ key: "end", kind: "host", name: "Gateway", where: "where the text comes out" });
  return way;
}

const sparesOf = (route, used) =>
  route.stages.filter(
    (other) =>
      other.stage !== used.stage && other.first === used.first && other.last === used.last,
  );

// Marks the one thing that a traversal spends most of its time with.
function markSlowest(way) {
  const cost = (each) => {
    if (!each.leg) return 0;
    return each.kind === "line" ? each.leg.line_ms : each.leg.computed_ms + each.leg.waited_ms;
  };
  const most = Math.max(...way.map(cost));
  for (const each of way) each.slowest = most > 0 && cost(each) === most;
}

export function showRoute(list, route, legs) {
  const way = along(route, legs);
  markSlowest(way);
  keyed(list, way, (each) => each.key, make, fillIn);
}

function make({ kind }) {
  if (kind === "line")
    return el(
      "li",
      { class: "line" },
      el("span", { class: "took" }),
      el("span", { class: "more" }),
      el("span", { class: "badge late mark" }, "slowest"),
    );
  return el(
    "li",
    { class: "host" },
    el(
      "div",
      { class: "name" },
      el("span", { class: "what" }),
      el("span", { class: "badge late mark" }, "slowest"),
      el("span", { class: "took" }),
    ),
    el("div", { class: "where" }),
    el("div", { class: "load" }),
    el("div", { class: "spare" }),
  );
}

function fillIn(node, each) {
  node.classList.toggle("slowest", each.slowest);
  at(node, "mark").hidden = !each.slowest;
  if (each.kind === "line") fillLine(node, each);
  else fillHost(node, each);
}

function fillLine(node, { leg, rtt }) {
  put(at(node, "took"), leg ? `≈\u00a0${ms(leg.line_ms)}` : "");
  const more = [];
  if (known(rtt)) more.push(`RTT\u00a0${ms(rtt)}`);
  if (leg) more.push(bytes(leg.bytes));
  put(at(node, "more"), more.join(" · "));
}

function fillHost(node, { name, where, stage, leg, spares = [] }) {
  const missing = stage?.missing === true;
  node.classList.toggle("missing", missing);
  const what = stage ? blocksOf(stage) : name;
  put(at(node, "what"), what[0].toUpperCase() + what.slice(1));
  put(at(node, "took"), leg ? ms(leg.computed_ms + leg.waited_ms) : "");
  if (!stage || missing) {
    put(at(node, "where"), missing ? "no stage serves them" : where);
  } else {
    const seen = `RTT\u00a0${ms(stage.rtt_ms)}`;
    put(at(node, "where"), `${short(stage.stage)} at ${stage.address} · ${stage.weights} · ${seen}`);
  }
  put(at(node, "load"), stage && !missing ? loadOf(stage, leg) : "");
  const others = spares.map((other) => `${short(other.stage)} at ${other.address}`);
  put(at(node, "spare"), others.length > 0 ? `replicas: ${others.join(", ")}` : "");
  at(node, "load").hidden = at(node, "load").textContent === "";
  at(node, "spare").hidden = others.length === 0;
}

function loadOf(stage, leg) {
  const texts = stage.sessions === 1 ? "1 text" : `${stage.sessions} texts`;
  const waited = leg && leg.waited_ms >= 0.05 ? ` · ${ms(leg.waited_ms)} in its queue` : "";
  return `${texts}, room for ${stage.room} more${waited}`;
}
