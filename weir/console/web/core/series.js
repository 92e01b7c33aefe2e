// `useSeries`: the time series of a model, or of all. After the first answer only later points are asked for.

import { get } from "./api.js";
import { useRef, useState } from "./html.js";
import { useTick } from "./polling.js";

const KEPT_MS = { 1000: 600_000, 10000: 3_600_000 };

/** Points of one resolution: columns of equal length, the oldest first. */
class Columns {
  constructor(stepMs) {
    this.stepMs = stepMs;
    this.at_ms = [];
  }

  add(answer) {
    const last = this.at_ms.at(-1) ?? -Infinity;
    const first = answer.at_ms.findIndex((at) => at > last);
    if (first < 0) return;
    const before = this.at_ms.length;
    for (const [name, values] of Object.entries(answer)) {
      if (!Array.isArray(values)) continue;
      this[name] ??= new Array(before).fill(null);
      this[name] = this[name].concat(values.slice(first));
    }
    const limit = this.at_ms.at(-1) - (KEPT_MS[this.stepMs] ?? 3_600_000);
    const old = this.at_ms.findIndex((at) => at > limit);
    if (old > 0) for (const [name, values] of Object.entries(this)) if (Array.isArray(values)) this[name] = values.slice(old);
  }
}

/** `{fine, coarse, atMs}`: the columns in steps of 1 s (10 min) and 10 s (1 h); null before the first answer. */
export function useSeries(model, everyMs = 1000) {
  const held = useRef({ model: undefined, steps: new Map(), sinceMs: 0 });
  const [, redraw] = useState(0);
  if (held.current.model !== model) held.current = { model, steps: new Map(), sinceMs: 0 };
  useTick(
    async (signal) => {
      const current = held.current;
      const query = new URLSearchParams();
      if (model) query.set("model", model);
      if (current.sinceMs) query.set("since_ms", current.sinceMs);
      const answer = await get(`/api/series?${query}`, signal);
      for (const resolution of answer.resolution) {
        if (!current.steps.has(resolution.step_ms)) current.steps.set(resolution.step_ms, new Columns(resolution.step_ms));
        current.steps.get(resolution.step_ms).add(resolution);
      }
      const lasts = [...current.steps.values()].map((columns) => columns.at_ms.at(-1) ?? 0);
      current.sinceMs = lasts.length ? Math.min(...lasts) : 0;
      redraw((count) => count + 1);
    },
    everyMs,
    [model],
  );
  const { steps } = held.current;
  const fine = steps.get(1000) ?? null;
  return { fine, coarse: steps.get(10000) ?? null, atMs: fine?.at_ms.at(-1) ?? 0 };
}
