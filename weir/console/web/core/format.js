// Numbers, durations, sizes and times as text. An unknown value (null) is a dash.

export const UNKNOWN = "–";

/** A number with at most three significant digits: 0.123, 4.57, 89.1, 1 234, 56.7k. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size >= 1e9) return `${significant(value / 1e9)}G`;
  if (size >= 1e6) return `${significant(value / 1e6)}M`;
  if (size >= 1e5) return `${significant(value / 1e3)}k`;
  if (Number.isInteger(value)) return grouped(value);
  return significant(value);
}

/** A rate or a mean: always with decimals below 100, so that a column of them is easy to compare. */
export function decimal(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value === 0) return "0";
  return value < 100 ? value.toFixed(value < 10 ? 2 : 1) : number(Math.round(value));
}

function significant(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1000) return grouped(Math.round(value));
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size >= 1) return value.toFixed(2);
  return value.toPrecision(2).replace(/e.*$/, (exponent) => exponent);
}

/** A whole number with thin spaces between thousands. */
export function grouped(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return String(value).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
}

/** A share of 1 as percent. */
export function percent(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const scaled = value * 100;
  if (scaled > 0 && scaled < 1) return "<1 %";
  return `${scaled < 10 ? Number(scaled.toFixed(1)) : Math.round(scaled)} %`;
}

/** Milliseconds in the fitting unit. */
export function milliseconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value === 0) return "0 ms";
  if (value < 1) return `${Math.round(value * 1000)} µs`;
  if (value < 1000) return `${significant(value)} ms`;
  return seconds(value / 1000);
}

/** Microseconds in the fitting unit. */
export function microseconds(value) {
  return value === null || value === undefined ? UNKNOWN : milliseconds(value / 1000);
}

/** Seconds as 0.25 s, 12.3 s, 4 min 5 s, 2 h 3 min, 5 d 4 h. */
export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 1) return value === 0 ? "0 s" : milliseconds(value * 1000);
  if (value < 60) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return parts(Math.floor(whole / 60), "min", whole % 60, "s");
  if (whole < 86400) return parts(Math.floor(whole / 3600), "h", Math.floor((whole % 3600) / 60), "min");
  return parts(Math.floor(whole / 86400), "d", Math.floor((whole % 86400) / 3600), "h");
}

function parts(large, largeUnit, small, smallUnit) {
  return small ? `${large} ${largeUnit} ${small} ${smallUnit}` : `${large} ${largeUnit}`;
}

/** GiB, with a decimal below 10. */
export function gibibytes(value) {
  return value === null || value === undefined ? UNKNOWN : `${value < 10 ? Number(value.toFixed(2)) : Math.round(value)} GiB`;
}

/** Bytes as KiB, MiB, GiB. */
export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 1024) return `${value} B`;
  let scaled = value;
  for (const unit of ["KiB", "MiB", "GiB"]) {
    scaled /= 1024;
    if (scaled < 1024 || unit === "GiB") return `${scaled < 10 ? scaled.toFixed(1) : Math.round(scaled)} ${unit}`;
  }
  return UNKNOWN;
}

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const DAY = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });

/** The time of day of a unix time in ms. */
export function clock(atMs) {
  return atMs ? CLOCK.format(atMs) : UNKNOWN;
}

/** Day and time of a unix time in ms; the day is left out for today. */
export function moment(atMs) {
  if (!atMs) return UNKNOWN;
  const isToday = new Date(atMs).toDateString() === new Date().toDateString();
  return isToday ? CLOCK.format(atMs) : `${DAY.format(atMs)} ${CLOCK.format(atMs)}`;
}

/** A text as a sentence: with a capital letter and a full stop. */
export function sentence(text) {
  return text ? `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}` : "";
}

/** The first line of a text. */
export function firstLine(text) {
  return text.split("\n", 1)[0];
}

/** "1 worker", "3 workers". */
export function count(number, noun, plural = `${noun}s`) {
  return `${grouped(number)} ${number === 1 ? noun : plural}`;
}

/** The last part of a process id, which distinguishes it on the screen. */
export function shortId(id) {
  return id.length > 30 ? `…${id.slice(-24)}` : id;
}
