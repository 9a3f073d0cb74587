// What a chart needs to know of lines and axes, without drawing any.

import { known } from "./words.js";

const SPANS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
];
export const UNITS = [
  [1e12, "TB"],
  [1e9, "GB"],
  [1e6, "MB"],
  [1e3, "kB"],
  [1, "B"],
];

// About this many steps between two values, each 1, 2 or 5 times a power of ten.
export function niceStep(from, to, steps) {
  const rough = (to - from) / steps || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((each) => each * power >= rough * 0.999);
}

export function timeStep(from, to, steps) {
  const rough = (to - from) / steps;
  return SPANS.find((each) => each >= rough) ?? 86400 * niceStep(from / 86400, to / 86400, steps);
}

export function ticks(from, to, step) {
  const found = [];
  const begin = Math.ceil(from / step - 1e-9);
  const most = 50; // a number so large that adding one does not change it must not hang the page
  for (let n = 0; n < most && (begin + n) * step <= to + 1e-9 * step; n += 1)
    found.push((begin + n) * step);
  return found;
}

// The value of a line at x, between its points; null beyond its ends.
export function valueAt(line, x) {
  const after = line.findIndex((point) => point.x >= x);
  if (after < 0) return null;
  const [a, b] = [line[Math.max(0, after - 1)], line[after]];
  if (b.x === x) return b.y;
  return after === 0 ? null : a.y + ((b.y - a.y) * (x - a.x)) / (b.x - a.x);
}

// The least and the greatest value that the lines have between two x, both included.
export function extent(lines, begin, end) {
  const values = lines.flatMap((line) => [
    ...line.filter((each) => each.x >= begin && each.x <= end).map((each) => each.y),
    ...[valueAt(line, begin), valueAt(line, end)].filter(known),
  ]);
  return [Math.min(...values), Math.max(...values)];
}

// Points as (x, y) in the order of x; what is not a finite number is left out.
export function lineOf(points, over) {
  const key = over === "time" ? "time" : "bytes_seen";
  const line = points
    .filter((each) => known(each.ce) && known(each[key]))
    .map((each) => ({ x: each[key], y: each.ce, point: each }));
  return line.sort((a, b) => a.x - b.x);
}

// A reference that does not know when it was measured is, over time, only the level it ended at.
export const timeless = (points) =>
  points.length > 1 && points.every((each) => each.time === points[0].time);

export function shortTime(seconds, stride) {
  if (seconds === 0) return "0";
  if (stride < 60) return `${seconds} s`;
  if (stride < 3600 && seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (stride < 86400)
    return `${Math.floor(seconds / 3600)}:${String(Math.round((seconds % 3600) / 60)).padStart(2, "0")} h`;
  return `${Math.round(seconds / 86400)} d`;
}
