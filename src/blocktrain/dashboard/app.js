// The page of a run: what the coordinator says, put where people look for it.

import { Chart } from "./chart.js";
import { History, fillRow, makeRow, many } from "./history.js";
import { lineOf, valueAt } from "./lines.js";
import { Live } from "./live.js";
import { countBlocks, countWorkers, labelOf, showBlocks, showWorkers, stateOf } from "./tables.js";
import {
  NONE,
  byId,
  bytes,
  ce,
  clock,
  count,
  duration,
  fill,
  keyed,
  known,
  part,
  put,
  signed,
  whole,
} from "./words.js";

const TONES = { running: "fine", paused: "late", stopping: "late" };

const history = new History();
const chart = new Chart(byId("chart"));
let status = null;
let heardAt = 0; // when the status came, by this machine's clock; the coordinator's may differ
let goneSince = null;
let states = new Map(); // worker -> here, silent, gone or banned

const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

// --- the top --------------------------------------------------------------------------------------

// Rounds of a block that are over: the one it is in is not, unless the block waits after it.
const closedOf = (block) =>
  ["waiting", "finished"].includes(block.phase) ? block.round : Math.max(0, block.round - 1);

function showTop() {
  const { blocks, curve, reference, rounds, state } = status;
  put(byId("name"), status.name || "BlockTrain");
  put(
    byId("about"),
    `run ${status.run.slice(0, 8)} · ${status.data} · begun ${duration(status.age)} ago`,
  );
  put(byId("state"), state);
  byId("state").className = `badge large ${TONES[state] ?? ""}`;

  const slowest = blocks.reduce((a, b) => (closedOf(b) < closedOf(a) ? b : a), blocks[0]);
  const closed = slowest ? closedOf(slowest) : 0;
  const round = Math.min(rounds, slowest?.round ?? 0);
  put(byId("round"), `${whole(round)} of ${whole(rounds)}`);
  put(byId("round-sub"), closed >= rounds ? "all closed" : `${whole(closed)} closed`);
  fill(byId("round-bar"), part(closed, rounds));

  const [left, basis] = timeLeft(slowest, closed);
  put(byId("left"), left);
  put(byId("left-sub"), basis);

  const newest = lineOf(curve, "bytes").at(-1);
  const level = newest ? valueAt(lineOf(reference, "bytes"), newest.x) : null;
  put(byId("ce"), newest ? ce(newest.y) : NONE);
  const apart = level === null ? "" : `, ${signed(newest.y - level)} to reference`;
  put(byId("ce-sub"), newest ? `at ${bytes(newest.x)}${apart}` : "not measured yet");

  put(byId("seen"), bytes(status.bytes_seen));
  put(byId("seen-sub"), "by each block");
  put(byId("moved"), bytes(status.bytes_moved));
  const each = status.parameters ? status.bytes_moved / status.parameters : null;
  put(
    byId("moved-sub"),
    each === null ? "" : `${each.toFixed(each < 10 ? 2 : 1)} per parameter, ${status.codec}`,
  );
  put(byId("parameters"), count(status.parameters));
  put(
    byId("parameters-sub"),
    `in ${many(blocks.length, "block")}, ${many(status.replicas, "replica")} each`,
  );

  const where = state === "running" ? `round ${round}/${rounds}` : state;
  document.title = `${status.name || "BlockTrain"} · ${where}${newest ? ` · CE ${ce(newest.y)}` : ""}`;
}

// By the pace of the block that is furthest behind: of its last rounds if they were seen, else since
// the run was made.
function timeLeft(slowest, closed) {
  if (status.state === "ended") return ["over", "the run has ended"];
  if (status.state === "paused") return ["paused", "by the owner"];
  if (status.state === "stopping") return ["soon", "finishing what is under way"];
  const seen = slowest ? history.pace(slowest.block) : null;
  const pace = seen ?? (closed > 0 ? status.age / closed : null);
  if (pace === null) return [NONE, "known after the first round"];
  return [
    `≈ ${duration(Math.round(pace * (status.rounds - closed)))}`,
    `at ${duration(pace)} a round`,
  ];
}

// --- everything -----------------------------------------------------------------------------------

function showCurve() {
  if (status === null) return;
  chart.show({
    curve: status.curve,
    reference: status.reference,
    over: chosen("over"),
    part: chosen("part"),
  });
}

function showEvents() {
  if (status === null) return;
  const named = new Map(status.workers.map((worker) => [worker.worker, labelOf(worker)]));
  const nameOf = (who) => named.get(who) ?? (/^[0-9a-f]{64}$/.test(who) ? who.slice(0, 8) : who);
  const which = chosen("events");
  const listed = history.listed(which);
  keyed(
    byId("event-rows"),
    listed,
    (event) => event.number,
    makeRow,
    (row, event) => fillRow(row, event, nameOf),
  );
  byId("events-empty").hidden = listed.length > 0;
  put(
    byId("events-empty"),
    which === "all" ? "Nothing yet." : "Nothing was late, and nothing was refused.",
  );
}

// What changes by the mere passing of time. A paused run has no deadline, and of one whose
// coordinator is gone nobody knows.
function tick() {
  if (goneSince !== null)
    put(byId("gone-for"), `· ${duration(Math.round((Date.now() - goneSince) / 1000))}`);
  if (status === null || goneSince !== null) return;
  const passed = (Date.now() - heardAt) / 1000;
  countBlocks(byId("block-rows"), status, status.state === "paused" ? 0 : passed);
  countWorkers(byId("worker-rows"), status, passed);
  const now = new Map(status.workers.map((worker) => [worker.worker, stateOf(worker, passed)]));
  const here = [...now.values()].filter((each) => each === "here").length;
  put(byId("workers-sub"), status.workers.length ? `${here} of ${status.workers.length} here` : "");
  announce(now);
}

// For those who listen to the page instead of looking at it.
function announce(now) {
  const news = status.workers
    .filter(
      (worker) => states.has(worker.worker) && states.get(worker.worker) !== now.get(worker.worker),
    )
    .map((worker) => `${labelOf(worker)} is ${now.get(worker.worker)}`);
  if (news.length > 0) put(byId("said"), news.slice(0, 5).join(", "));
  states = now;
}

function heard(said) {
  // A coordinator of another version may say less than this one.
  status = {
    blocks: [],
    workers: [],
    curve: [],
    reference: [],
    events: [],
    name: "",
    data: "",
    run: "",
    ...said,
  };
  heardAt = Date.now();
  history.add(status);
  showTop();
  showCurve();
  showBlocks(byId("block-rows"), status, history);
  const open = status.blocks.filter(
    (block) => block.phase === "open" && known(block.seconds_left),
  ).length;
  put(byId("blocks-sub"), `${open} of ${status.blocks.length} open`);
  showWorkers(byId("worker-rows"), status);
  byId("workers-empty").hidden = status.workers.length > 0;
  showEvents();
  tick();
}

function lost(since) {
  goneSince = since;
  const over = status?.state === "ended";
  put(byId("gone-since"), `The coordinator has been gone since ${clock(since)}`);
  put(
    byId("gone-more"),
    over
      ? "· The run had ended; this is how it was."
      : "· What you see is from then; trying again.",
  );
  byId("gone").hidden = false;
  document.body.classList.add("stale");
  tick();
}

function found() {
  goneSince = null;
  byId("gone").hidden = true;
  document.body.classList.remove("stale");
  put(byId("said"), "The coordinator is back.");
}

for (const form of document.querySelectorAll("form.switches")) {
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => {
    showCurve();
    showEvents();
  });
}
setInterval(tick, 1_000);
new Live({ heard, lost, found });
