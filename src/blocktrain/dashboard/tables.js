// The blocks and the workers: one row each, kept by number and by id, so that nothing jumps.

import { many } from "./history.js";
import {
  NONE,
  bytes,
  countdown,
  duration,
  el,
  fill,
  keyed,
  known,
  pace,
  part,
  percent,
  put,
  svg,
  whole,
} from "./words.js";

const LAST_ROUNDS = 24;
const QUIET_WORKER = 30; // seconds; half of the lease that a run has unless its owner says otherwise

const cell = (label, name, ...children) =>
  el("td", { role: "cell", "data-label": label, class: name }, ...children);
const bar = (name) => el("div", { class: `bar ${name}`, "aria-hidden": "true" }, el("span"));
const at = (row, selector) => row.querySelector(selector);

// Every item with its row.
function* rowsOf(tbody, items, key) {
  const rows = new Map([...tbody.children].map((row) => [row.dataset.key, row]));
  for (const item of items) yield [item, rows.get(String(key(item)))];
}

// --- blocks ---------------------------------------------------------------------------------------

export function showBlocks(tbody, status, history) {
  const fillIn = (row, block) => fillBlock(row, block, status, history);
  keyed(tbody, status.blocks, (block) => block.block, makeBlock, fillIn);
}

function makeBlock(block) {
  return el(
    "tr",
    { role: "row" },
    el(
      "th",
      { role: "rowheader", scope: "row" },
      el("span", { class: "only-narrow" }, "Block "),
      String(block.block + 1),
    ),
    cell("Round", "round"),
    cell("Phase", "phase", el("span", { class: "badge" })),
    cell("Deadline", "deadline wide", el("span", { class: "text" }), bar("")),
    cell("Updates", "updates", el("span", { class: "text" }), bar("")),
    cell("Workers", "workers number"),
    cell("Taken", "taken number"),
    cell("Late", "late number"),
    cell("Refused", "refused number"),
    cell("Last rounds", "rounds"),
  );
}

function fillBlock(row, block, status, history) {
  put(at(row, ".round"), `${whole(block.round)} of ${whole(status.rounds)}`);
  const phase = at(row, ".phase .badge");
  put(phase, block.phase);
  phase.className = `badge ${block.phase === "open" ? "fine" : ""}`;
  put(
    at(row, ".updates .text"),
    block.phase === "open" ? `${block.updates} of ${status.replicas}` : NONE,
  );
  fill(
    at(row, ".updates .bar span"),
    block.phase === "open" ? part(block.updates, status.replicas) : 0,
  );
  for (const name of ["workers", "taken", "late", "refused"]) {
    const node = at(row, `.${name}`);
    put(node, whole(block[name]));
    node.classList.toggle("some", block[name] > 0);
  }
  const rounds = history.rounds(block.block, LAST_ROUNDS).filter((each) => known(each.opened));
  const strip = at(row, ".rounds");
  const drawn = JSON.stringify(rounds);
  if (strip.dataset.drawn !== drawn) {
    strip.dataset.drawn = drawn;
    strip.replaceChildren(rounds.length ? roundsStrip(rounds) : NONE);
  }
}

const toneOf = (record) =>
  record.refused || record.dropped
    ? "refused"
    : record.salvaged || record.extended || record.freed
      ? "late"
      : "fine";

function roundsStrip(rounds) {
  const longest = Math.max(...rounds.map((each) => each.closed - each.opened), 1e-9);
  const bars = rounds.map((record, index) => {
    const took = record.closed - record.opened;
    const height = Math.max(3, (22 * took) / longest);
    const said = [
      `Round ${record.round} took ${duration(took)}`,
      record.taken ? `${record.taken} taken` : "",
      record.salvaged ? `${record.salvaged} late` : "",
      record.refused ? `${record.refused} refused` : "",
      record.extended ? `extended ${many(record.extended, "time")}` : "",
    ];
    const place = { x: 7 * index, y: 24 - height, width: 5, height, rx: 1, class: toneOf(record) };
    return svg("rect", place, svg("title", {}, said.filter(Boolean).join(", ")));
  });
  const tones = rounds.map(toneOf);
  const of = (tone) => tones.filter((each) => each === tone).length;
  const label = `Last ${many(rounds.length, "round")}: ${of("fine")} in time, ${of("late")} with something late, ${of("refused")} with something refused`;
  const width = 7 * LAST_ROUNDS;
  return svg(
    "svg",
    {
      class: "strip",
      viewBox: `0 0 ${width} 24`,
      preserveAspectRatio: "xMinYMid",
      role: "img",
      "aria-label": label,
    },
    ...bars,
  );
}

// Between two words from the coordinator the page counts down by itself.
export function countBlocks(tbody, status, passed) {
  for (const [block, row] of rowsOf(tbody, status.blocks, (each) => each.block)) {
    const open = known(block.seconds_left);
    const left = open ? Math.max(0, block.seconds_left - passed) : 0;
    const of = countdown(block.allowance);
    put(
      at(row, ".deadline .text"),
      !open ? NONE : left > 0 ? `${countdown(left)} of ${of}` : "due",
    );
    const span = at(row, ".deadline .bar span");
    fill(span, open ? part(left, block.allowance) : 0);
    span.classList.toggle("late", open && left < 0.15 * block.allowance);
  }
}

// --- workers --------------------------------------------------------------------------------------

const RANK = { here: 0, silent: 1, gone: 2, banned: 3 };

export function stateOf(worker, passed) {
  if (worker.banned) return "banned";
  if (worker.silent === null) return worker.here ? "here" : "gone";
  return worker.here && worker.silent + passed < QUIET_WORKER ? "here" : "silent";
}

export const labelOf = (worker) => worker.name || worker.worker.slice(0, 8);

export function showWorkers(tbody, status) {
  const total = status.workers.reduce((sum, worker) => sum + worker.bytes_trained, 0);
  const rank = new Map(status.workers.map((worker) => [worker, RANK[stateOf(worker, 0)]]));
  const sorted = [...status.workers].sort(
    (a, b) =>
      rank.get(a) - rank.get(b) ||
      labelOf(a).localeCompare(labelOf(b)) ||
      (a.worker < b.worker ? -1 : 1),
  );
  keyed(
    tbody,
    sorted,
    (worker) => worker.worker,
    makeWorker,
    (row, worker) => fillWorker(row, worker, total),
  );
}

function makeWorker(worker) {
  const who = [
    el("span", { class: "name" }),
    el("code", { class: "muted", title: worker.worker }, worker.worker.slice(0, 8)),
  ];
  return el(
    "tr",
    { role: "row" },
    el("th", { role: "rowheader", scope: "row" }, ...who),
    cell(
      "State",
      "here",
      el("span", { class: "dot", "aria-hidden": "true" }),
      el("span", { class: "text" }),
    ),
    cell("At", "at"),
    cell("s a step", "pace number"),
    cell("Sent", "sent number"),
    cell("Received", "received number"),
    cell("Updates", "updates number"),
    cell("Contribution", "given wide", el("span", { class: "text" }), bar("")),
  );
}

function fillWorker(row, worker, total) {
  put(at(row, ".name"), labelOf(worker));
  const round = known(worker.round) ? `, round ${worker.round}` : "";
  put(at(row, ".at"), known(worker.block) ? `block ${worker.block + 1}${round}` : NONE);
  put(at(row, ".pace"), pace(worker.seconds_per_step));
  put(at(row, ".sent"), bytes(worker.traffic?.sent));
  put(at(row, ".received"), bytes(worker.traffic?.received));
  put(at(row, ".updates"), whole(worker.updates));
  const share = part(worker.bytes_trained, total);
  put(at(row, ".given .text"), `${bytes(worker.bytes_trained)} · ${percent(share)}`);
  fill(at(row, ".given .bar span"), share);
}

export function countWorkers(tbody, status, passed) {
  for (const [worker, row] of rowsOf(tbody, status.workers, (each) => each.worker)) {
    const state = stateOf(worker, passed);
    row.className = state;
    const silent =
      state === "silent" ? `silent ${duration(Math.round(worker.silent + passed))}` : state;
    put(at(row, ".here .text"), silent);
  }
}
