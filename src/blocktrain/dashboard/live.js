// The line to the coordinator: events as they come, a question when it is quiet, and the honest word
// when it is gone. Addresses are relative to the page, so that a base path and a proxy do no harm.

const QUIET = 15_000; // ms; the coordinator's heartbeat is a comment, which a page cannot hear
const PATIENCE = 10_000; // ms that an answer may take
const FIRST_RETRY = 1_000; // ms; doubled at each failure
const LAST_RETRY = 10_000;

export class Live {
  #source = null;
  #heard = Date.now();
  #asked = 0;
  #since = null; // when it was lost; null while it is there
  #retry = FIRST_RETRY;
  #timer = null;

  // heard(status) at every word; lost(since) and found() when the coordinator goes and comes back.
  constructor({ heard, lost, found }) {
    this.tell = { heard, lost, found };
    setInterval(() => this.#watch(), 1_000);
    addEventListener("online", () => this.#open());
    this.#open();
  }

  #open() {
    clearTimeout(this.#timer);
    this.#source?.close();
    const source = new EventSource("v1/events");
    this.#source = source;
    source.addEventListener("open", () => this.#ask());
    source.addEventListener("status", (event) => this.#hear(event.data));
    // A browser tries again by itself after a cut, but gives up for good on a proxy's error page.
    source.addEventListener("error", () => this.#lose(Date.now()));
  }

  // Asks for the status: at the beginning, and when no event came for long. That is also how the page
  // stays alive behind a proxy that holds events back.
  async #ask() {
    const asked = Date.now();
    this.#asked = asked;
    const limits = { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) };
    const body = await fetch("v1/status", limits)
      .then((answer) => (answer.ok ? answer.text() : null))
      .catch(() => null);
    if (this.#heard > asked) return; // an event has told something newer meanwhile
    if (body === null) this.#lose(this.#heard);
    else this.#hear(body);
  }

  #watch() {
    const quiet = Date.now() - Math.max(this.#heard, this.#asked);
    if (this.#since === null && quiet >= QUIET) this.#ask();
  }

  #hear(body) {
    let status;
    try {
      status = JSON.parse(body);
    } catch {
      return; // cut short; the next word is whole
    }
    if (status?.say !== "status") return;
    this.#heard = Date.now();
    this.#retry = FIRST_RETRY;
    if (this.#since !== null) {
      this.#since = null;
      this.tell.found();
    }
    this.tell.heard(status);
  }

  #lose(since) {
    this.#source.close();
    if (this.#since === null) {
      this.#since = since;
      this.tell.lost(new Date(since));
    }
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#open(), this.#retry * (0.75 + 0.5 * Math.random()));
    this.#retry = Math.min(LAST_RETRY, 2 * this.#retry);
  }
}
