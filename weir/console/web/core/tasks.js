// Drawing in small tasks: charts that change in one tick are drawn one after another, so that input is handled between them.

const waiting = new Map();
let isPlanned = false;

/** Runs `draw` in a task of its own. A later one with the same `key` takes its place. */
export function drawLater(key, draw) {
  waiting.set(key, draw);
  plan();
}

/** Forgets the task of `key`. */
export function dropDrawing(key) {
  waiting.delete(key);
}

function plan() {
  if (isPlanned || !waiting.size) return;
  isPlanned = true;
  if (globalThis.scheduler?.postTask) scheduler.postTask(next, { priority: "user-visible" });
  else setTimeout(next, 0);
}

function next() {
  isPlanned = false;
  const [key, draw] = waiting.entries().next().value ?? [];
  if (draw) {
    waiting.delete(key);
    draw();
  }
  plan();
}
