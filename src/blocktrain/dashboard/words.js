// Numbers as people read them, and the few lines of DOM that every part of the page needs.
// Whatever comes from the coordinator is put on the page as text, never as markup.

export const NONE = "–";
const GAP = "\u00a0"; // a number and its unit stay on one line

export const known = (value) => typeof value === "number" && Number.isFinite(value);

function scaled(value, units) {
  if (!known(value)) return NONE;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return value.toFixed(digits) + (units[unit] && GAP + units[unit]);
}

export const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"]);
export const count = (value) => scaled(value, ["", "thousand", "million", "billion", "trillion"]);
export const whole = (value) => (known(value) ? value.toLocaleString("en") : NONE);
export const ce = (value) => (known(value) ? value.toFixed(3) : NONE);
export const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);

// How long: two units at most, since nobody plans by the second what takes hours.
export function duration(seconds) {
  if (!known(seconds)) return NONE;
  const of = (value, unit) => `${Math.floor(value)}${GAP}${unit}`;
  if (seconds < 9.95 && seconds % 1) return `${seconds.toFixed(1)}${GAP}s`;
  if (seconds < 119.5) return of(Math.round(seconds), "s");
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return of(minutes, "min");
  if (minutes < 48 * 60) return `${of(minutes / 60, "h")} ${of(minutes % 60, "min")}`;
  return `${of(minutes / 1440, "d")} ${of((minutes % 1440) / 60, "h")}`;
}

// Like a kitchen timer: 48 s, 4:05, 1:04:05.
export function countdown(seconds) {
  const left = Math.max(0, Math.ceil(seconds));
  if (left < 100) return `${left}${GAP}s`;
  const two = (value) => String(Math.floor(value)).padStart(2, "0");
  const hours = Math.floor(left / 3600);
  const minutes = Math.floor((left % 3600) / 60);
  return (hours ? `${hours}:${two(minutes)}` : String(minutes)) + `:${two(left % 60)}`;
}

// Seconds a step, aligned under each other.
export const pace = (seconds) => (known(seconds) ? seconds.toFixed(seconds < 10 ? 3 : 1) : NONE);

// The time of day by the reader's clock, and the day unless it is today.
export function clock(date) {
  const time = date.toLocaleTimeString("en-GB");
  if (date.toDateString() === new Date().toDateString()) return time;
  return `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}

export const part = (value, of) =>
  known(value) && of > 0 ? Math.min(1, Math.max(0, value / of)) : 0;
export const percent = (value) =>
  value > 0 && value < 0.01 ? `<${GAP}1${GAP}%` : `${Math.round(100 * value)}${GAP}%`;

// --- the page -------------------------------------------------------------------------------------

export const byId = (id) => document.getElementById(id);

// Makes an element; its attributes are ours, its children are nodes or plain text.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Says something only if it is new: what is selected stays selected, and nothing is read out twice.
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A bar's filled part. A custom property set by script needs no unsafe-inline.
export function fill(node, value) {
  node.style.setProperty("--part", value.toFixed(4));
}

// Brings the children of a parent into line with the items: kept by key, made, filled, removed.
export function keyed(parent, items, key, make, fillIn) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  items.forEach((item, index) => {
    const name = String(key(item));
    const node = old.get(name) ?? make(item);
    old.delete(name);
    node.dataset.key = name;
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
    fillIn(node, item);
  });
  for (const node of old.values()) node.remove();
}
