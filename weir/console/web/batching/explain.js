// What a model's recent batches show, in numbers and in sentences.

/** Why a scheduler sends a batch, by the reason it reports, as the end of "batches leave because …". */
export const REASONS = {
  full: "they are full",
  preferred: "they have a preferred size",
  delay: "the delay ends",
  free: "an instance is free",
  closed: "the next request may not join: its shape differs, or a rule of the model forbids it",
  alone: "a request runs alone after it was lost with a worker",
  single: "the model has no dynamic batching",
  together: "waiting requests travel in one message and run one by one",
  sequence: "the next requests of their sequences are there",
};

const MOST = 0.5;

/** Figures of `batches`: sizes, padding, waits (ms) and why they left. Null without batches. */
export function figuresOf(batches, settings) {
  if (!batches.length) return null;
  const rows = batches.reduce((total, batch) => total + batch.rows, 0);
  const padding = batches.reduce((total, batch) => total + batch.padding, 0);
  const waits = batches.flatMap((batch) => batch.waited_us).sort((a, b) => a - b);
  const most = Math.max(1, settings?.max_batch_size ?? 1);
  const delayUs = settings?.max_queue_delay_us ?? 0;
  const reasons = new Map();
  for (const { reason } of batches) reasons.set(reason, (reasons.get(reason) ?? 0) + 1 / batches.length);
  return {
    batches: batches.length,
    rows,
    meanRows: rows / batches.length,
    used: rows / (batches.length * most),
    padded: padding / Math.max(1, rows + padding),
    medianWaitUs: quantile(waits, 0.5),
    p99WaitUs: quantile(waits, 0.99),
    full: batches.filter((batch) => batch.rows >= most).length / batches.length,
    delayed: reasons.get("delay") ?? 0,
    reasons: [...reasons].sort((a, b) => b[1] - a[1]),
    alone: batches.filter((batch) => batch.rows === 1).length / batches.length,
    most,
    delayUs,
  };
}

function quantile(sorted, share) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))] : 0;
}

/** How many batches there are of each number of rows, from 1 to the most. */
export function sizesOf(batches, most) {
  const counts = new Array(most).fill(0);
  for (const batch of batches) counts[Math.min(most, Math.max(1, batch.rows)) - 1] += 1;
  return counts;
}

/** Sentences that explain what is seen; the first says why batches leave, the last what could be changed. */
export function explained(figures) {
  if (!figures) return ["No batch has been formed since you opened this page. Send requests to the model to see how they are joined."];
  const { most, used, padded } = figures;
  const sentences = [whySentence(figures)];
  if (most > 1) sentences.push(`${share(used)} of the rows are used${padded > 0.005 ? `, and ${share(padded)} of what runs is padding` : ""}.`);
  sentences.push(waitSentence(figures));
  const advice = adviceOf(figures);
  if (advice) sentences.push(advice);
  return sentences;
}

function whySentence({ most, delayUs, alone, meanRows, reasons }) {
  const [[first, firstShare], second] = reasons;
  if (firstShare < MOST) return `Batches leave for different reasons: ${share(firstShare)} because ${REASONS[first] ?? first}${second ? `, ${share(second[1])} because ${REASONS[second[0]] ?? second[0]}` : ""}.`;
  if (first === "single") return "Each request is a batch: the model has no dynamic batching.";
  if (first === "full") return `Batches leave because they are full: ${share(firstShare)} have ${most} rows, the max_batch_size.`;
  if (first === "delay") return `Batches leave after ${duration(delayUs)} because the delay ends: for ${share(firstShare)} of them the first request waited as long as max_queue_delay allows.`;
  if (first !== "free") return `Batches leave because ${REASONS[first] ?? first} (${share(firstShare)} of them).`;
  if (alone >= 0.9) return "Batches leave as soon as an instance is free, and nearly each request found one at once: it runs alone.";
  return `Batches leave as soon as an instance is free, as there is no queue delay: what arrived while the instances were busy runs together, ${number(meanRows)} rows on average.`;
}

function waitSentence({ medianWaitUs, p99WaitUs }) {
  return `Half of the requests wait for less than ${duration(medianWaitUs)} for their batch, 99 % for less than ${duration(p99WaitUs)}.`;
}

function adviceOf({ delayUs, full, delayed, alone, used }) {
  if (delayUs > 0 && delayed >= MOST && alone >= MOST) return "The delay costs time and joins few requests: a shorter max_queue_delay_microseconds would answer sooner.";
  if (delayUs > 0 && delayed >= MOST && used < 0.5) return "A shorter max_queue_delay_microseconds would answer sooner with smaller batches; a longer one would fill them further.";
  if (full >= 0.9) return "A larger max_batch_size could join more, if the model gains by it.";
  return "";
}

function share(value) {
  return `${value > 0 && value < 0.01 ? "<1" : Math.round(value * 100)} %`;
}

function number(value) {
  return value < 10 ? value.toFixed(1) : String(Math.round(value));
}

/** Microseconds as "250 µs" or "2.0 ms". */
export function duration(us) {
  if (us < 1000) return `${Math.round(us)} µs`;
  if (us < 100_000) return `${(us / 1000).toFixed(1)} ms`;
  return us < 1_000_000 ? `${Math.round(us / 1000)} ms` : `${(us / 1_000_000).toFixed(1)} s`;
}
