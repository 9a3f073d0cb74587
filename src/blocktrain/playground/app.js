// The playground: a prompt goes to the gateway, and the text is shown as it comes.

import { blocksOf, ms, showRoute } from "./route.js";
import { Trouble, look, write } from "./talk.js";
import { Text } from "./text.js";
import { NONE, byId, bytes, el, put, whole } from "./words.js";

const LOOK_EVERY = 2_000; // ms
const KEY = "blocktrain key";
const NOTES = {
  exact:
    "The first stage drafts, one traversal checks the whole draft: the same text as byte by byte, sooner.",
  speculative:
    "Drafts are copied from the text so far, as others do it: the same text as byte by byte.",
  ar: "One traversal for each byte: the plain way.",
  whole: "One traversal finds every byte at once; more traversals refine it.",
};

const text = new Text();
let route = null;
let legs = []; // of the last traversal
let writing = null; // the AbortController of the text that is being written

const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
const number = (id) => byId(id).valueAsNumber;
const many = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;

// --- what is served -------------------------------------------------------------------------------

async function lookAround() {
  try {
    const first = route === null;
    route = await look(byId("key").value);
    if (first) settle();
    trouble(null);
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    if (error.status === 401) askForKey();
    else trouble(error.message);
    return;
  }
  show();
}

// What this model can do decides what can be chosen.
function settle() {
  put(byId("name"), route.model);
  document.title = `${route.model} · BlockTrain playground`;
  for (const input of document.querySelectorAll('input[name="mode"]')) {
    input.disabled = !route.modes.includes(input.value);
    input.checked = input.value === route.mode;
  }
  byId("codec").replaceChildren(...route.codecs.map((name) => el("option", { value: name }, name)));
  byId("codec").value = route.codec;
  byId("length").max = String(route.max_tokens);
  settleMode();
}

function settleMode() {
  const mode = chosen("mode");
  byId("traversals-part").hidden = mode !== "whole";
  byId("traversals").disabled = mode !== "whole";
  put(byId("mode-note"), NOTES[mode]);
}

function show() {
  put(byId("about"), `${many(route.blocks, "block")} on ${many(route.stages.length, "stage")}`);
  put(byId("state"), route.ready ? "ready" : "no route");
  byId("state").className = `badge large ${route.ready ? "fine" : "refused"}`;
  put(byId("route-sub"), `${many(route.served, "text")} now, ${whole(route.waiting)} waiting`);
  byId("route-empty").hidden = route.troubles.length === 0;
  put(byId("route-empty"), route.troubles.join(" "));
  showRoute(byId("hops"), route, legs);
}

function askForKey() {
  byId("key-part").hidden = false;
  put(byId("state"), "key needed");
  byId("state").className = "badge large late";
  if (byId("key").value) trouble("The gateway does not know this key.");
  else if (document.activeElement === document.body) byId("key").focus();
}

function trouble(words) {
  byId("trouble").hidden = words === null;
  put(byId("trouble"), words ?? "");
}

// --- writing --------------------------------------------------------------------------------------

function wish() {
  const mode = chosen("mode");
  const seed = number("seed");
  return {
    prompt: byId("prompt").value,
    max_tokens: number("length"),
    temperature: number("temperature"),
    codec: byId("codec").value,
    mode,
    ...(Number.isNaN(seed) ? {} : { seed }),
    ...(mode === "whole" ? { traversals: number("traversals") } : {}),
  };
}

// The numbers beside the text, counted here as its pieces come.
class Pace {
  asked = performance.now();
  begun = null; // when the turn came
  first = null; // ms to the first byte
  bytes = 0;
  traversals = 0;
  wire = 0;
  replays = 0;

  see(piece) {
    if (piece.bytes > 0) this.first ??= performance.now() - this.asked;
    this.bytes += piece.bytes;
    this.traversals += 1;
    this.wire += piece.sent;
    this.replays += piece.replayed;
    this.show();
  }

  show() {
    const seconds = (performance.now() - (this.begun ?? this.asked)) / 1000;
    const rate = this.bytes / seconds;
    const each = this.bytes / this.traversals;
    put(byId("rate"), this.bytes ? (rate < 99.5 ? rate.toFixed(1) : whole(Math.round(rate))) : NONE);
    put(byId("rate-sub"), this.bytes ? `${whole(this.bytes)} in ${seconds.toFixed(1)}\u00a0s` : "");
    put(byId("each"), this.bytes ? (each < 99.5 ? each.toFixed(2) : whole(Math.round(each))) : NONE);
    const moves = this.replays ? `, ${this.replays} replayed` : "";
    put(byId("each-sub"), this.bytes ? `${many(this.traversals, "traversal")}${moves}` : "");
    put(byId("first"), ms(this.first));
    put(byId("first-sub"), this.first === null ? "" : "from asking");
    put(byId("wire"), this.bytes ? bytes(this.wire / this.bytes) : NONE);
    put(byId("wire-sub"), this.bytes ? `a byte, ${bytes(this.wire)} in all` : "");
  }
}

async function begin() {
  const asked = wish();
  const pace = new Pace();
  const stopper = new AbortController();
  writing = stopper;
  legs = [];
  byId("go").disabled = true;
  byId("stop").disabled = false;
  trouble(null);
  pace.show();
  text.begin(asked.prompt, asked.mode === "whole");
  put(byId("written-sub"), "asking");
  try {
    for await (const said of write(asked, byId("key").value, stopper.signal))
      hear(said, pace, asked);
  } catch (error) {
    const stopped = stopper.signal.aborted;
    if (!stopped && !(error instanceof Trouble) && !(error instanceof TypeError)) throw error;
    if (error.status === 401) askForKey();
    else if (!stopped)
      trouble(error instanceof Trouble ? error.message : "The line to the gateway broke.");
    finish(stopped ? `stopped after ${whole(pace.bytes)} bytes` : "broken off");
  } finally {
    writing = null;
    byId("go").disabled = false;
    byId("stop").disabled = true;
    text.end();
    lookAround();
  }
}

function hear(said, pace, asked) {
  switch (said.say) {
    case "waiting":
      put(byId("written-sub"), `in line, ${whole(said.count)} waiting`);
      break;
    case "begun":
      pace.begun = performance.now();
      put(byId("written-sub"), `writing, seed ${said.seed}`);
      break;
    case "sight": {
      const stage = route?.stages.find((each) => each.stage === said.stage);
      const where = stage ? blocksOf(stage) : "a stage";
      text.frame(said.text, `traversal ${pace.traversals + 1}, after ${where}`);
      break;
    }
    case "piece":
      pace.see(said);
      if (asked.mode !== "whole") text.piece({ ...said, traversal: pace.traversals });
      else if (said.bytes > 0) text.finish(said.text, `finished by traversal ${pace.traversals}`);
      if (said.legs.length > 0) legs = said.legs;
      if (route) showRoute(byId("hops"), route, legs);
      break;
    case "ended":
      text.rest(said.text);
      finish(`${whole(said.bytes)} bytes, seed ${said.seed}`);
      put(byId("said"), `Done: ${many(pace.bytes, "byte")} in ${many(pace.traversals, "traversal")}.`);
  }
}

function finish(words) {
  put(byId("written-sub"), words);
}

// --- hands ----------------------------------------------------------------------------------------

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (writing === null) begin();
});
byId("stop").addEventListener("click", () => writing?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") writing?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
byId("modes").addEventListener("change", settleMode);
byId("frames").addEventListener("input", (event) => text.show(event.target.valueAsNumber));
byId("key").value = sessionStorage.getItem(KEY) ?? "";
byId("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, byId("key").value);
  lookAround();
});

lookAround();
setInterval(() => {
  if (!document.hidden) lookAround();
}, LOOK_EVERY);
