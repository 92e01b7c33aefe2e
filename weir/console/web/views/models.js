// Models: the index of all models in the repositories, loaded or not.

import { count, decimal, milliseconds, number, percent } from "../core/format.js";
import { html, useMemo } from "../core/html.js";
import { usePoll } from "../core/polling.js";
import { go, link, replaceQuery } from "../core/router.js";
import { Choices, Waiting } from "../components/controls.js";
import { cells, numeric, Table } from "../components/table.js";

/** How good a state of a model is. */
export function toneOf(state) {
  if (state === "READY") return "good";
  if (state === "LOADING" || state === "UNLOADING") return "warn";
  return state === "UNAVAILABLE" ? "bad" : "idle";
}

const FILTERS = {
  all: () => true,
  ready: (row) => row.state === "READY",
  failing: (row) => row.state === "UNAVAILABLE" && Boolean(row.reason) && row.reason !== "unloaded",
  unloaded: (row) => !row.loaded,
};

export function Models({ route }) {
  const { data, error } = usePoll("/api/models", 1000);
  const search = route.query.q ?? "";
  const kind = FILTERS[route.query.show] ? route.query.show : "all";
  const rows = useMemo(() => (data?.models ?? []).map((model) => ({ ...model, ready: versionsOf(model) })), [data]);
  const filter = useMemo(() => {
    const text = search.toLowerCase();
    if (!text && kind === "all") return null;
    return (row) => FILTERS[kind](row) && row.name.toLowerCase().includes(text);
  }, [search, kind]);
  const hasReasons = rows.some((row) => row.reason);
  const columns = useMemo(
    () => [
      { title: "Model", field: "name", formatter: cells.link((row) => link(["models", row.id]), (name, row) => (row.namespace ? `${name} (${row.namespace})` : name)), widthGrow: 3, minWidth: 130, longest: 320 },
      { title: "State", field: "state", formatter: cells.state(toneOf, (state) => (state || "not loaded").toLowerCase()), minWidth: 112 },
      { title: "Versions", field: "ready", responsive: 7 },
      numeric("Requests/s", "requests_per_s", decimal),
      numeric("Failures/s", "failures_per_s", decimal, { responsive: 3 }),
      numeric("Median", "p50_ms", milliseconds, { responsive: 3 }),
      numeric("p99", "p99_ms", milliseconds, { responsive: 1 }),
      numeric("Waiting", "queue_depth", number, { responsive: 3 }),
      numeric("Batch", "batch_size", decimal, { responsive: 4 }),
      { title: "Busy", field: "utilization", formatter: cells.share(percent), sorter: "number", responsive: 4 },
      numeric("Workers", "workers", number, { responsive: 8 }),
      ...(hasReasons ? [{ title: "Reason", field: "reason", formatter: cells.reason(), widthGrow: 6, minWidth: 260, responsive: 2 }] : []),
    ],
    [hasReasons],
  );
  if (!data) return html`<h1>Models</h1><${Waiting} error=${error} what="the models" />`;
  const ready = rows.filter((row) => row.state === "READY").length;
  return html`
    <header class="view-head">
      <h1>Models</h1>
      <p class="note">${count(rows.length, "model")}, ${ready} ready</p>
      <div class="controls">
        <input type="search" aria-label="Filter by name" placeholder="Filter by name" value=${search} onInput=${(event) => replaceQuery({ q: event.target.value })} />
        <${Choices} label="Which" choices=${[["all", "All"], ["ready", "Ready"], ["failing", "Failing"], ["unloaded", "Not loaded"]]} current=${kind} onChoose=${(show) => replaceQuery({ show: show === "all" ? "" : show })} />
      </div>
    </header>
    <${Table} key=${hasReasons} label="Models" columns=${columns} rows=${rows} rowKey="id" sort=${[{ column: "name", dir: "asc" }]} filter=${filter} onOpen=${(row) => go(["models", row.id])} maxHeight="calc(100vh - 116px)" empty="No model fits" />
  `;
}

function versionsOf(model) {
  const ready = model.versions.filter((version) => version.state === "READY");
  if (!model.versions.length) return "";
  const names = ready.map((version) => version.version).join(", ");
  return ready.length === model.versions.length ? names : `${names || "none"} of ${model.versions.length}`;
}
