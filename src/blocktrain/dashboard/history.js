// What happened: remembered for as long as the page is open, and told in sentences.
// The coordinator sends its last few hundred events; the page keeps more of them than that.

import { bytes, ce, countdown, duration, el, known, put, clock } from "./words.js";

const MOST_KEPT = 5_000;
const MOST_LISTED = 200;
const TROUBLE = new Set(["salvaged", "refused", "extended", "freed", "dropped", "banned"]);
const LABELS = { salvaged: "late" };
const TONES = {
  salvaged: "late",
  extended: "late",
  freed: "late",
  paused: "late",
  refused: "refused",
  dropped: "refused",
  banned: "refused",
  evaluated: "fine",
};

export class History {
  events = [];
  #run = null;
  #rounds = new Map();

  add(status) {
    const told = status.events ?? [];
    const newest = this.events.at(-1)?.number ?? -1;
    // Another run, or one restored from a backup: what was remembered is not its past.
    if (status.run !== this.#run || (told.at(-1)?.number ?? newest) < newest) {
      this.events = [];
      this.#rounds = new Map();
      this.#run = status.run;
    }
    const last = this.events.at(-1)?.number ?? -1;
    const fresh = told.filter((event) => event.number > last);
    for (const event of fresh) this.#count(event);
    this.events = [...this.events, ...fresh].slice(-MOST_KEPT);
    return fresh;
  }

  #count({ kind, time, detail }) {
    const { block, round } = detail ?? {};
    if (!known(block) || !known(round)) return;
    if (!this.#rounds.has(block)) this.#rounds.set(block, new Map());
    const rounds = this.#rounds.get(block);
    if (!rounds.has(round)) rounds.set(round, { round });
    const record = rounds.get(round);
    if (kind === "opened" || kind === "closed") record[kind] = time;
    else record[kind] = (record[kind] ?? 0) + 1;
  }

  // The last rounds of a block that are over, oldest first.
  rounds(block, most) {
    const rounds = [...(this.#rounds.get(block)?.values() ?? [])];
    return rounds
      .filter((each) => each.closed)
      .sort((a, b) => a.round - b.round)
      .slice(-most);
  }

  // Seconds from one close to the next, over the last rounds of a block; null if too few were seen.
  pace(block) {
    const rounds = this.rounds(block, 20);
    if (rounds.length < 3) return null;
    const [first, last] = [rounds[0], rounds.at(-1)];
    return (last.closed - first.closed) / (last.round - first.round);
  }

  listed(which) {
    const events =
      which === "all" ? this.events : this.events.filter((each) => TROUBLE.has(each.kind));
    return events.slice(-MOST_LISTED).reverse();
  }
}

// --- in words -------------------------------------------------------------------------------------

const first = (detail, ...keys) =>
  keys.map((key) => detail[key]).find((value) => value != null && value !== "");

// Tells an event as one sentence; keys that are missing are left out, unknown kinds are spelled out.
export function sentence(event, nameOf) {
  const detail = event.detail ?? {};
  const why = first(detail, "why", "reason", "sentence");
  const who = first(detail, "worker", "name");
  const name = who == null ? "a worker" : nameOf(String(who));
  const seconds = first(detail, "seconds", "seconds_left");
  const slot = known(detail.slot) ? ` (slot ${detail.slot + 1})` : "";
  const round = detail.round == null ? "" : `round ${detail.round}`;
  const block = known(detail.block) ? `block ${detail.block + 1}` : "";
  const place = [block, round].filter(Boolean).join(", ");
  const For = place && ` for ${place}`;
  const because = why == null ? "" : `: ${why}`;
  switch (event.kind) {
    case "opened":
      return `${capital(place)} opened${known(seconds) ? `, ${countdown(seconds)} until its deadline` : ""}${because}`;
    case "closed":
      return `${capital(place)} closed${known(detail.updates) ? ` with ${many(detail.updates, "update")}` : ""}${because}`;
    case "extended":
      return `Nothing came by the deadline${For}${known(seconds) ? `; ${duration(seconds)} more` : ""}${because}`;
    case "taken":
      return `${name}’s update${For} is in${slot}${because}`;
    case "salvaged":
      return `${name}’s update${For} came late${because}`;
    case "refused":
      return `${name}’s update${For} was refused${because}`;
    case "freed":
      return `${name} no longer holds its slot of ${place}${slot}${because}`;
    case "dropped":
      return `An update${For} was dropped${because || ", its worker being banned"}`;
    case "joined":
      return `${name} joined${because}`;
    case "left":
      return `${name} left${because}`;
    case "banned":
      return `${name} was banned by the owner${because}`;
    case "paused":
      return `The owner paused the run${because}`;
    case "resumed":
      return `The run goes on${because}`;
    case "stopping":
      return `The run stops after what is under way${because}`;
    case "ended":
      return `The run is over${because}`;
    case "evaluated":
      return `CE ${ce(detail.ce)}${known(detail.bytes_seen) ? ` at ${bytes(detail.bytes_seen)}` : ""}${because}`;
    default:
      return Object.entries(detail)
        .map(([key, value]) => `${key} ${value}`)
        .join(", ");
  }
}

export const many = (number, thing) => `${number} ${thing}${number === 1 ? "" : "s"}`;
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

export function makeRow(event) {
  const date = new Date(1000 * event.time);
  const time = el(
    "time",
    { datetime: date.toISOString(), title: date.toLocaleString() },
    clock(date),
  );
  const badge = el(
    "span",
    { class: `badge ${TONES[event.kind] ?? ""}` },
    LABELS[event.kind] ?? event.kind,
  );
  return el("li", {}, time, badge, el("span", { class: "sentence" }));
}

export function fillRow(row, event, nameOf) {
  put(row.lastElementChild, sentence(event, nameOf));
}
