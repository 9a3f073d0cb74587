// CE over bytes seen or over time, drawn as SVG by hand: two lines, two axes, one hair that reads
// them. The legend is the readout: it says the newest values, or those under the pointer.

import {
  UNITS,
  extent,
  lineOf,
  niceStep,
  shortTime,
  ticks,
  timeStep,
  timeless,
  valueAt,
} from "./lines.js";
import { bytes, ce, duration, el, put, signed, svg } from "./words.js";

const MARGIN = { top: 10, right: 14, bottom: 40, left: 52 };

export class Chart {
  #shown = { curve: [], reference: [], over: "bytes", part: "whole" };
  #drawn = "";
  #at = null; // x of the hair; null is the newest point

  constructor(place) {
    const legend = el("p", { class: "legend" });
    for (const [name, line] of Object.entries({ run: "run", ref: "reference", apart: "" })) {
      const text = el("span");
      const value = el("span", { class: "value" });
      const label = el("span", { class: "entry" }, text, value);
      if (line) label.prepend(el("span", { class: `line ${line}` }));
      this[name] = { label, text, value, points: [] };
      legend.append(label);
    }
    put(this.run.text, "this run");
    put(this.apart.text, "difference");
    this.where = el("span", { class: "where muted" });
    legend.append(this.where);
    const slider = {
      class: "plot",
      role: "slider",
      tabindex: "0",
      "aria-label": "CE, point by point",
      "aria-valuemin": "0",
    };
    this.svg = svg("svg", slider);
    this.empty = el(
      "p",
      { class: "empty muted" },
      "No CE has been measured yet. Its owner measures it with ",
      el("code", {}, "blocktrain evaluate --follow URL"),
      ".",
    );
    place.append(legend, this.svg, this.empty);
    this.svg.addEventListener("pointermove", (event) => this.#point(event));
    this.svg.addEventListener("pointerdown", (event) => this.#point(event));
    this.svg.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") this.#read(null); // a finger that is lifted has not gone
    });
    this.svg.addEventListener("blur", () => this.#read(null));
    this.svg.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(this.svg);
  }

  show(shown) {
    this.#shown = { ...this.#shown, ...shown };
    const drawn = JSON.stringify(this.#shown);
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    this.#draw();
  }

  #draw() {
    const { curve, reference, over, part } = this.#shown;
    this.run.points = lineOf(curve, over);
    const level = over === "time" && timeless(reference);
    this.ref.points = level ? [] : lineOf(reference, over);
    const both = [...this.run.points, ...this.ref.points];
    this.empty.hidden = curve.length > 0;
    this.svg.toggleAttribute("hidden", both.length === 0);
    this.run.label.hidden = this.run.points.length === 0;
    this.ref.label.hidden = reference.length === 0;
    put(this.ref.text, level ? "reference, at its end" : "reference");
    const { width, height } = this.svg.getBoundingClientRect();
    if (both.length === 0 || width < 100) return this.svg.replaceChildren();

    const newest = this.run.points.at(-1)?.x ?? 0;
    const zoomed = part === "half" && this.run.points.length > 2;
    const end = zoomed ? newest : Math.max(...both.map((each) => each.x), 1e-9);
    const begin = zoomed ? newest / 2 : 0;
    const last = level ? lineOf(reference, "bytes").at(-1) : null;
    if (last)
      this.ref.points = [
        { x: begin, y: last.y },
        { x: end, y: last.y },
      ];

    const [bottom, top] = extent([this.run.points, this.ref.points], begin, end);
    const slack = 0.06 * (top - bottom) || 0.05 * Math.abs(top) || 0.05;
    const [low, high] = [bottom - slack, top + slack];
    const [w, h] = [width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom];
    this.scale = {
      begin,
      end,
      w,
      h,
      x: (x) => (w * (x - begin)) / (end - begin),
      y: (y) => (h * (high - y)) / (high - low),
    };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...this.#axes(low, high), ...this.#lines());
    this.svg.setAttribute("aria-valuemax", String(Math.max(0, this.#stops().length - 1)));
    this.#read(this.#at);
  }

  #axes(low, high) {
    const { begin, end, w, h, x, y } = this.scale;
    const [left, top] = [MARGIN.left, MARGIN.top];
    const over = this.#shown.over;
    const step = niceStep(low, high, Math.max(2, h / 40));
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const parts = ticks(low, high, step).flatMap((value) => [
      svg("line", {
        class: "grid",
        x1: left,
        x2: left + w,
        y1: top + y(value),
        y2: top + y(value),
      }),
      svg(
        "text",
        { class: "tick", x: left - 8, y: top + y(value), dy: "0.32em", "text-anchor": "end" },
        value.toFixed(digits),
      ),
    ]);
    const [per, unit] = UNITS.find(([size]) => end >= size) ?? [1, "B"];
    const stride = (over === "time" ? timeStep : niceStep)(begin, end, Math.max(2, w / 70));
    const decimals = Math.max(0, -Math.floor(Math.log10(stride / per) + 1e-9));
    for (const value of ticks(begin, end, stride)) {
      const text = over === "time" ? shortTime(value, stride) : (value / per).toFixed(decimals);
      parts.push(
        svg("line", {
          class: "mark",
          x1: left + x(value),
          x2: left + x(value),
          y1: top + h,
          y2: top + h + 4,
        }),
      );
      parts.push(
        svg(
          "text",
          { class: "tick", x: left + x(value), y: top + h + 17, "text-anchor": "middle" },
          text,
        ),
      );
    }
    parts.push(svg("line", { class: "axis", x1: left, x2: left + w, y1: top + h, y2: top + h }));
    const below = over === "time" ? "time since the run was made" : `${unit} seen by each block`;
    parts.push(
      svg(
        "text",
        { class: "label", x: left + w / 2, y: top + h + 35, "text-anchor": "middle" },
        below,
      ),
    );
    const aside = {
      class: "label",
      transform: `translate(13 ${top + h / 2}) rotate(-90)`,
      "text-anchor": "middle",
    };
    parts.push(svg("text", aside, "CE, nats per byte"));
    return parts;
  }

  // An inner svg cuts off what lies outside of its box.
  #lines() {
    const { w, h, x, y } = this.scale;
    const d = (line) =>
      line
        .map((each, n) => `${n ? "L" : "M"}${x(each.x).toFixed(1)} ${y(each.y).toFixed(1)}`)
        .join("");
    const line = (points, name) => svg("path", { class: `curve ${name}`, d: d(points) });
    const box = svg("svg", { x: MARGIN.left, y: MARGIN.top, width: w, height: h, class: "lines" });
    this.hair = svg("line", { class: "hair", y1: 0, y2: h });
    this.dots = {
      run: svg("circle", { class: "spot run", r: 4 }),
      ref: svg("circle", { class: "spot reference", r: 3.5 }),
    };
    box.append(this.hair);
    if (this.ref.points.length) box.append(line(this.ref.points, "reference"));
    if (this.run.points.length) box.append(line(this.run.points, "run"));
    // The dots stand on top of it, whole even at its rim.
    const rim = svg("g", { transform: `translate(${MARGIN.left} ${MARGIN.top})` });
    rim.append(this.dots.ref, this.dots.run);
    return [box, rim];
  }

  // --- reading ------------------------------------------------------------------------------------

  // Where the hair may stand: at what was measured, of this run if there is any of it.
  #stops() {
    const line = this.run.points.length ? this.run.points : this.ref.points;
    return line.filter((each) => each.x >= this.scale.begin && each.x <= this.scale.end);
  }

  #nearest(x) {
    const stops = this.#stops();
    return stops.reduce(
      (best, each, n) => (Math.abs(each.x - x) < Math.abs(stops[best].x - x) ? n : best),
      0,
    );
  }

  #point(event) {
    if (!this.scale) return;
    const { begin, end, w } = this.scale;
    const inside = event.clientX - this.svg.getBoundingClientRect().left - MARGIN.left;
    const stop = this.#stops()[this.#nearest(begin + ((end - begin) * inside) / w)];
    if (stop) this.#read(stop.x);
  }

  #key(event) {
    const stops = this.scale ? this.#stops() : [];
    if (stops.length === 0) return;
    const now = this.#at === null ? stops.length - 1 : this.#nearest(this.#at);
    const next = {
      ArrowLeft: now - 1,
      ArrowDown: now - 1,
      ArrowRight: now + 1,
      ArrowUp: now + 1,
      Home: 0,
      End: stops.length - 1,
    }[event.key];
    if (event.key === "Escape") return this.#read(null);
    if (next === undefined) return;
    event.preventDefault();
    this.#read(stops[Math.min(stops.length - 1, Math.max(0, next))].x);
  }

  #read(x) {
    this.#at = x;
    const stops = this.scale ? this.#stops() : [];
    if (stops.length === 0) return;
    const n = x === null ? stops.length - 1 : this.#nearest(x);
    const stop = stops[n];
    const run = valueAt(this.run.points, stop.x);
    const ref = valueAt(this.ref.points, stop.x);
    put(this.run.value, ce(run));
    put(this.ref.value, ce(ref));
    this.apart.label.hidden = run === null || ref === null;
    put(this.apart.value, this.apart.label.hidden ? "" : signed(run - ref));
    const when = this.run.points.length && stop.point ? `, ${duration(stop.point.time)}` : "";
    const where = stop.point ? `at ${bytes(stop.point.bytes_seen)}${when}` : "";
    put(this.where, where);
    const place = (dot, value) => {
      dot.toggleAttribute("hidden", value === null);
      dot.setAttribute("cx", this.scale.x(stop.x));
      dot.setAttribute("cy", value === null ? 0 : this.scale.y(value));
    };
    place(this.dots.run, run);
    place(this.dots.ref, x === null ? null : ref);
    this.hair.toggleAttribute("hidden", x === null);
    this.hair.setAttribute("x1", this.scale.x(stop.x));
    this.hair.setAttribute("x2", this.scale.x(stop.x));
    this.svg.setAttribute("aria-valuenow", String(n));
    this.svg.setAttribute("aria-valuetext", `${where}: this run ${ce(run)}, reference ${ce(ref)}`);
  }
}
