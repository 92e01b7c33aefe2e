// Polling of the server: each path has one poller, however many components use it, and only while one of them is mounted and
// the tab is visible. A poller that gets no reply tries again after 1, 2, 4 and at most 8 seconds, one that is denied after a
// minute.

import { ApiError, ConnectionError, connection, get } from "./api.js";
import { useEffect, useState } from "./html.js";

const MAX_WAIT_MS = 8000;

/** What the access policy denies is denied the next time too, until somebody edits it; each refusal is in the audit log. */
const DENIED_WAIT_MS = 60_000;
const KEPT_PATHS = 40;

/** @type {Map<string, Poller>} pollers by path, the most recently used last: their last data is shown when a view returns. */
const pollers = new Map();

class Poller {
  constructor(path) {
    this.path = path;
    this.data = null;
    this.error = null;
    this.atMs = 0;
    this._listeners = new Map();
    this._timer = null;
    this._running = null;
    this._failures = 0;
  }

  get isUsed() {
    return this._listeners.size > 0;
  }

  subscribe(listener, everyMs) {
    this._listeners.set(listener, everyMs);
    if (this._timer === null && this._running === null) this._plan(Math.max(0, this.atMs + everyMs - Date.now()));
    return () => {
      this._listeners.delete(listener);
      if (!this.isUsed) this._stop();
    };
  }

  /** Asks at once, if it is in use. */
  refresh() {
    if (!this.isUsed) return;
    this._stop();
    this._plan(0);
  }

  _plan(waitMs) {
    clearTimeout(this._timer);
    this._timer = null;
    if (this.isUsed && !document.hidden) this._timer = setTimeout(() => this._ask(), waitMs);
  }

  _stop() {
    clearTimeout(this._timer);
    this._timer = null;
    this._running?.abort();
    this._running = null;
  }

  async _ask() {
    const running = new AbortController();
    this._timer = null;
    this._running = running;
    const started = Date.now();
    try {
      this.data = await get(this.path, running.signal);
      this.error = null;
      this._failures = 0;
      this.atMs = Date.now();
    } catch (error) {
      if (running.signal.aborted) return;
      this.error = error;
      this._failures += 1;
    }
    if (this._running !== running) return;
    this._running = null;
    const everyMs = Math.min(...this._listeners.values());
    let waitMs = Math.max(0, everyMs - (Date.now() - started));
    if (this.error instanceof ConnectionError) {
      waitMs = Math.min(MAX_WAIT_MS, 1000 * 2 ** (this._failures - 1));
      connection.failed(Date.now() + waitMs);
    }
    if (this.error instanceof ApiError && this.error.status === 403) waitMs = DENIED_WAIT_MS;
    this._plan(waitMs);
    for (const listener of this._listeners.keys()) listener();
  }
}

function pollerOf(path) {
  const poller = pollers.get(path) ?? new Poller(path);
  pollers.delete(path);
  pollers.set(path, poller);
  if (pollers.size > KEPT_PATHS) {
    for (const [other, candidate] of pollers) {
      if (!candidate.isUsed && other !== path) {
        pollers.delete(other);
        break;
      }
    }
  }
  return poller;
}

document.addEventListener("visibilitychange", () => {
  for (const poller of pollers.values()) document.hidden ? poller._stop() : poller.refresh();
});

/** What the server answers at `path`, asked again every `everyMs`: `{data, error, atMs}`. No path: nothing is asked. */
export function usePoll(path, everyMs = 1000) {
  const [, redraw] = useState(0);
  useEffect(() => {
    if (!path) return undefined;
    return pollerOf(path).subscribe(() => redraw((count) => count + 1), everyMs);
  }, [path, everyMs]);
  const poller = path ? pollerOf(path) : null;
  return { data: poller?.data ?? null, error: poller?.error ?? null, atMs: poller?.atMs ?? 0 };
}

/** Asks again at once for what is shown of `root` (with any query) and, if `withParts`, of what lies below it: after an action. */
export function refresh(root, { withParts = false } = {}) {
  for (const [path, poller] of pollers) {
    const [name] = path.split("?");
    if (name === root || (withParts && name.startsWith(`${root}/`))) poller.refresh();
  }
}

/** Runs `step(signal)` every `everyMs` while the component is mounted and the tab visible; failures are retried. */
export function useTick(step, everyMs, dependencies) {
  useEffect(() => {
    const over = new AbortController();
    let timer = null;
    let failures = 0;
    let isRunning = false;
    async function run() {
      timer = null;
      if (document.hidden || over.signal.aborted || isRunning) return;
      isRunning = true;
      let waitMs = everyMs;
      const started = Date.now();
      try {
        await step(over.signal);
        failures = 0;
        waitMs = Math.max(0, everyMs - (Date.now() - started));
      } catch (error) {
        if (over.signal.aborted) return;
        failures += 1;
        waitMs = Math.min(MAX_WAIT_MS, everyMs * 2 ** failures);
        if (error instanceof ConnectionError) connection.failed(Date.now() + waitMs);
      } finally {
        isRunning = false;
      }
      if (!over.signal.aborted) timer = setTimeout(run, waitMs);
    }
    function onVisibility() {
      if (!document.hidden && timer === null) run();
      else if (!document.hidden) {
        clearTimeout(timer);
        run();
      }
    }
    document.addEventListener("visibilitychange", onVisibility);
    run();
    return () => {
      over.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisibility);
    };
  }, dependencies);
}
