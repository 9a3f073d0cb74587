// The text as it comes: bytes of one traversal share a tint; a whole text sharpens, frame by frame.

import { byId, el, put, whole } from "./words.js";

const ms = (seconds) => `${whole(Math.round(1000 * seconds))} ms`;

export class Text {
  #box = byId("text");
  #frames = []; // of a whole text: what every hop made of it, with the words that say so
  #prompt = "";
  #finished = ""; // of a whole text
  #following = true; // whether the slider stands at the newest frame

  begin(prompt, isWhole) {
    this.#frames = [];
    this.#prompt = prompt;
    this.#finished = "";
    this.#following = true;
    this.#box.replaceChildren(el("span", { class: "prompt" }, prompt));
    this.#box.classList.add("writing");
    byId("frames-part").hidden = true;
    byId("tints").hidden = isWhole;
  }

  // What one traversal gave. Its last byte is the whole model's own; those before were guessed.
  piece(said) {
    if (said.text === "") return; // half a character: it comes with the next one
    const tint = `tint-${said.traversal % 2}`;
    const title =
      `traversal ${said.traversal}, ${ms(said.seconds)}: ` +
      `${said.bytes - 1} of ${said.guessed} guesses were right, and one byte of the model`;
    const letters = [...said.text];
    const own = letters.pop();
    const span = el("span", { class: tint, title }, letters.join(""));
    span.append(el("span", { class: "own" }, own));
    const near = this.#box.scrollHeight - this.#box.scrollTop - this.#box.clientHeight < 40;
    this.#box.append(span);
    if (near) this.#box.scrollTop = this.#box.scrollHeight;
  }

  // What was held back: half a character at the very end.
  rest(text) {
    if (text !== "") this.#box.append(text);
  }

  // A part of a whole text will not change any more.
  finish(text, words) {
    this.#finished += text;
    this.frame(this.#finished, words);
  }

  // How the whole text looks after one hop, or at the end.
  frame(text, words) {
    this.#frames.push({ text, words });
    const slider = byId("frames");
    slider.max = String(this.#frames.length - 1);
    byId("frames-part").hidden = false;
    if (this.#following) {
      slider.value = slider.max;
      this.show(this.#frames.length - 1);
    }
  }

  // Shows one of the frames; what differs from the one before is marked.
  show(index) {
    this.#following = index === this.#frames.length - 1;
    const { text, words } = this.#frames[index];
    const before = [...(this.#frames[index - 1]?.text ?? "")];
    const runs = [];
    for (const [place, letter] of [...text].entries()) {
      const changed = index > 0 && letter !== before[place];
      if (runs.at(-1)?.changed === changed) runs.at(-1).letters.push(letter);
      else runs.push({ changed, letters: [letter] });
    }
    this.#box.replaceChildren(
      el("span", { class: "prompt" }, this.#prompt),
      ...runs.map((run) =>
        el("span", { class: run.changed ? "changed" : "same" }, run.letters.join("")),
      ),
    );
    put(byId("frame-note"), words);
    byId("frames").setAttribute("aria-valuetext", words);
  }

  end() {
    this.#box.classList.remove("writing");
  }
}
