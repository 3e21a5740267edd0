/** Numbers and times as people read them. */

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const UNITS = ["B", "KB", "MB", "GB", "TB", "PB"];
export const NONE = "–";

const HIDDEN = /(\p{Extended_Pictographic}[\ufe0f\u{1f3fb}-\u{1f3ff}]?\u200d(?=\p{Extended_Pictographic}))|[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\u034f\u115f\u1160\u2800\u3164\uffa0]/gu;

/** A text of others with an escape for each character that cannot be seen or turns others round; emoji keep their joiners. */
export function visible(text) {
  return text.replace(HIDDEN, (found, emoji) => emoji ?? escape(found.codePointAt(0).toString(16)));
}

function escape(digits) {
  return digits.length > 4 ? `\\u{${digits}}` : `\\u${digits.padStart(4, "0")}`;
}

export function count(value) {
  return WHOLE.format(value);
}

/** Whole below 100,000, then 123.4K, 5.6M. */
export function compact(value) {
  return Math.abs(value) < 100_000 ? WHOLE.format(value) : COMPACT.format(value);
}

/** Decimal units, as disks and networks are sold by. */
export function bytes(value) {
  let unit = 0;
  let scaled = Math.abs(value);
  while (scaled >= 999.5 && unit < UNITS.length - 1) {
    scaled /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2;
  return `${value < 0 ? "-" : ""}${scaled.toFixed(digits)} ${UNITS[unit]}`;
}

export function percent(ratio) {
  const value = ratio * 100;
  return `${value > 0 && value < 10 ? value.toFixed(1) : value.toFixed(0)} %`;
}

/** Milliseconds in the unit that fits; nothing measured is a dash. */
export function milliseconds(value) {
  if (!value) return NONE;
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${value.toFixed(0)} ms`;
  if (value < 60_000) return `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s`;
  return duration(value / 1000);
}

export function seconds(value) {
  return milliseconds(value * 1000);
}

/** The two largest units. */
export function duration(value) {
  const total = Math.max(0, Math.round(value));
  const parts = [
    [Math.floor(total / 86_400), "d"],
    [Math.floor(total / 3600) % 24, "h"],
    [Math.floor(total / 60) % 60, "min"],
    [total % 60, "s"],
  ];
  const first = parts.findIndex(([amount]) => amount > 0);
  if (first < 0) return "0 s";
  return parts
    .slice(first, first + 2)
    .filter(([amount]) => amount > 0)
    .map(([amount, unit]) => `${amount} ${unit}`)
    .join(" ");
}

export function rate(value, unit = "tok/s") {
  if (!value) return NONE;
  return `${value < 100 ? value.toFixed(1) : count(value)} ${unit}`;
}

function two(value) {
  return String(value).padStart(2, "0");
}

/** Time of day in the reader's time zone; with the date when it was not today. */
export function clock(epochS) {
  if (epochS === null || epochS === undefined) return "earlier";
  const at = new Date(epochS * 1000);
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  const today = new Date();
  if (at.toDateString() === today.toDateString()) return time;
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${time}`;
}
