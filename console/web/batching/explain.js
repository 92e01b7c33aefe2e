// What a model's recent batches show, in numbers and in sentences.

/** Above this share of the delay, a batch's first request counts as having waited until the delay ended. */
const NEAR_DELAY = 0.9;

const FULL_SHARE = 0.5;

/** Figures of `batches`: sizes, padding, waits (ms) and why they left. Null without batches. */
export function figuresOf(batches, settings) {
  if (!batches.length) return null;
  const rows = batches.reduce((total, batch) => total + batch.rows, 0);
  const padding = batches.reduce((total, batch) => total + batch.padding, 0);
  const waits = batches.flatMap((batch) => batch.waited_us).sort((a, b) => a - b);
  const held = batches.map((batch) => batch.held_us).sort((a, b) => a - b);
  const most = Math.max(1, settings?.max_batch_size ?? 1);
  const delayUs = settings?.max_queue_delay_us ?? 0;
  const isFull = (batch) => batch.rows >= most;
  const isDelayed = (batch) => !isFull(batch) && delayUs > 0 && batch.held_us >= delayUs * NEAR_DELAY;
  return {
    batches: batches.length,
    rows,
    meanRows: rows / batches.length,
    used: rows / (batches.length * most),
    padded: padding / Math.max(1, rows + padding),
    medianWaitUs: quantile(waits, 0.5),
    p99WaitUs: quantile(waits, 0.99),
    medianHeldUs: quantile(held, 0.5),
    full: batches.filter(isFull).length / batches.length,
    delayed: batches.filter(isDelayed).length / batches.length,
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
  const { most, delayUs, full, delayed, alone, used, padded, medianHeldUs } = figures;
  const sentences = [];
  if (most === 1) {
    sentences.push("Each request runs alone: the model's max_batch_size is 1, or 0.");
    return [...sentences, waitSentence(figures)];
  }
  if (full >= FULL_SHARE) sentences.push(`Batches leave because they are full: ${share(full)} have ${most} rows, the max_batch_size.`);
  else if (delayUs > 0 && delayed >= FULL_SHARE) sentences.push(`Batches leave after ${duration(delayUs)} because the delay ends: for ${share(delayed)} of them the first request waited as long as max_queue_delay allows.`);
  else if (delayUs > 0) sentences.push(`Most batches leave before the delay of ${duration(delayUs)} ends and before they are full: they have a preferred size, or no further request is expected in time.`);
  else if (alone >= 0.9) sentences.push("Batches leave as soon as an instance is free, and there is no queue delay: nearly each request found a free instance at once and runs alone.");
  else sentences.push(`Batches leave as soon as an instance is free, and there is no queue delay: what arrived while the instances were busy runs together, ${number(figures.meanRows)} rows on average.`);
  sentences.push(`${share(used)} of the rows are used${padded > 0.005 ? `, and ${share(padded)} of what runs is padding` : ""}.`);
  sentences.push(waitSentence(figures));
  const advice = adviceOf({ most, delayUs, full, delayed, alone, used, medianHeldUs });
  if (advice) sentences.push(advice);
  return sentences;
}

function waitSentence({ medianWaitUs, p99WaitUs }) {
  return `Half of the requests wait for less than ${duration(medianWaitUs)} for their batch, 99 % for less than ${duration(p99WaitUs)}.`;
}

function adviceOf({ delayUs, full, delayed, alone, used }) {
  if (delayUs > 0 && delayed >= FULL_SHARE && alone >= FULL_SHARE) return "The delay costs time and joins few requests: a shorter max_queue_delay_microseconds would answer sooner.";
  if (delayUs > 0 && delayed >= FULL_SHARE && used < 0.5) return "A shorter max_queue_delay_microseconds would answer sooner with smaller batches; a longer one would fill them further.";
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
