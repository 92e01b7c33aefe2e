// Requests to the console's server, and whether it replies.

import { useEffect, useState } from "./html.js";

/** An error that the server reported: `status` and its text, unchanged. */
export class ApiError extends Error {
  constructor(status, text, body = null) {
    super(text);
    this.status = status;
    this.body = body;
  }
}

/** The server did not reply at all. */
export class ConnectionError extends Error {}

/** Whether the server replies: `lostMs` is since when it does not, or null. */
export const connection = {
  lostMs: null,
  nextTryMs: null,
  _listeners: new Set(),
  replied() {
    if (this.lostMs !== null) this._set(null, null);
  },
  failed(nextTryMs) {
    this._set(this.lostMs ?? Date.now(), nextTryMs ?? this.nextTryMs);
  },
  _set(lostMs, nextTryMs) {
    this.lostMs = lostMs;
    this.nextTryMs = nextTryMs;
    for (const listener of this._listeners) listener();
  },
};

/** The connection, as state of a component. */
export function useConnection() {
  const [, redraw] = useState(0);
  useEffect(() => {
    const listener = () => redraw((count) => count + 1);
    connection._listeners.add(listener);
    return () => connection._listeners.delete(listener);
  }, []);
  return connection;
}

const TIMEOUT_MS = 10_000;

/** The JSON at `path`. Raises ApiError or ConnectionError. */
export function get(path, signal) {
  return send("GET", path, undefined, { signal });
}

/** Sends an action and returns its JSON (null without content). Raises ApiError or ConnectionError. */
export function act(method, path, body, headers = {}) {
  const isRaw = body instanceof Blob || body instanceof Uint8Array || typeof body === "string";
  return send(method, path, body === undefined || isRaw ? body : JSON.stringify(body), {
    headers: { "X-Weir-Console": "1", ...(isRaw || body === undefined ? {} : { "Content-Type": "application/json" }), ...headers },
    timeoutMs: 600_000,
  });
}

async function send(method, path, body, { headers = {}, signal, timeoutMs = TIMEOUT_MS } = {}) {
  const limit = AbortSignal.timeout(timeoutMs);
  let response;
  let text;
  try {
    response = await fetch(path, { method, body, headers, signal: signal ? AbortSignal.any([signal, limit]) : limit, cache: "no-store" });
    text = await response.text();
  } catch (error) {
    if (signal?.aborted) throw error;
    connection.failed();
    throw new ConnectionError(error.name === "TimeoutError" ? "the console's server did not reply in time" : "the console's server does not reply");
  }
  connection.replied();
  const document = parsed(text);
  if (!response.ok) throw new ApiError(response.status, document?.error ?? (text.slice(0, 500) || `status ${response.status}`), document);
  return document;
}

function parsed(text) {
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** `name` as a segment of a path. */
export function segment(name) {
  return encodeURIComponent(name);
}
