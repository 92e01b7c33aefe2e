// Overview: the load of all models or of one, over the last minutes or hour.

import { count, decimal, milliseconds, number, percent } from "../core/format.js";
import { html, useMemo, useState } from "../core/html.js";
import { usePoll } from "../core/polling.js";
import { link, replaceQuery } from "../core/router.js";
import { useSeries } from "../core/series.js";
import { Choices, Figure, PlainTable, State } from "../components/controls.js";
import { LineChart, latest } from "../components/line_chart.js";
import { chartsOf } from "./charts.js";
import { cells, numeric, Table } from "../components/table.js";
import { keyOf, Problem, warningsOf } from "./problems.js";

const RANGES = [
  [60_000, "1 min"],
  [300_000, "5 min"],
  [600_000, "10 min"],
  [3_600_000, "1 h"],
];
const FINE_MS = 600_000;
const BUSIEST = 12;

export function Overview({ route, status }) {
  const model = route.query.model ?? "";
  const models = usePoll("/api/models", 2000);
  const series = useSeries(model);
  const [span, setSpan] = useState(300_000);
  const [chosen, setChosen] = useState(null);
  const now = series.atMs || Date.now();
  const range = useMemo(() => chosen ?? { fromMs: now - span, toMs: now }, [chosen, now, span]);
  const isFine = range.fromMs >= now - FINE_MS;
  const columns = isFine ? series.fine : series.coarse;
  // A new object for each tick: charts draw again when it changes.
  const shown = useMemo(() => (columns ? { ...columns } : null), [columns, series.atMs, columns?.at_ms.length]);
  const newest = series.fine;
  const charts = useMemo(() => chartsOf(!model), [!model]);
  const onRange = (fromMs, toMs) => toMs - fromMs > 2000 && setChosen({ fromMs, toMs });
  const names = (models.data?.models ?? []).filter((one) => one.loaded).map((one) => one.id);
  return html`
    <header class="view-head">
      <h1>Overview</h1>
      <div class="controls">
        <select aria-label="Model" value=${model} onChange=${(event) => replaceQuery({ model: event.target.value })}>
          <option value="">All models</option>
          ${[...new Set(model ? [model, ...names] : names)].map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select>
        <${Choices} label="Time" choices=${RANGES} current=${chosen ? null : span} onChoose=${(value) => (setSpan(value), setChosen(null))} />
        ${chosen ? html`<button type="button" class="primary" onClick=${() => setChosen(null)}>Follow again</button>` : null}
      </div>
    </header>
    <${Summary} status=${status.data} />
    <div class="figures">
      <${Figure} label="Requests" value=${number(latest(newest, "requests_per_s"))} unit="/s" />
      <${Figure} label="Failures" value=${number(latest(newest, "failures_per_s"))} unit="/s" tone=${latest(newest, "failures_per_s") > 0 ? "bad" : ""} />
      <${Figure} label="Median" value=${milliseconds(latest(newest, "p50_ms"))} title="Half of the requests took longer." />
      <${Figure} label="p99" value=${milliseconds(latest(newest, "p99_ms"))} title="One of 100 requests took longer." />
      <${Figure} label="Waiting" value=${number(latest(newest, "queue_depth"))} title="Requests that have not started." />
      <${Figure} label="Batch" value=${number(latest(newest, "batch_size"))} title="Mean number of requests that ran together." />
      <${Figure} label="Instances busy" value=${percent(latest(newest, "utilization"))} title="Share of time in which the instances of models ran batches." />
    </div>
    <div class="charts">
      ${charts.map((chart) => html`<${LineChart} key=${chart.title} ...${chart} columns=${shown} range=${range} onRange=${onRange} />`)}
    </div>
    <${Callers} queues=${status.data?.queues} model=${model} />
    ${model ? html`<p class="links"><a href=${link(["models", model])}>Configuration and versions of ${model}</a> · <a href=${link(["try", model])}>Try it</a> · <a href=${link(["batching", model])}>Watch its batches</a></p>` : html`<${Busiest} models=${models.data?.models} />`}
  `;
}

function Summary({ status }) {
  if (!status) return html`<p class="summary">…</p>`;
  const up = (role) => status.roles.filter((one) => one.role === role && one.state !== "silent").length;
  const warnings = warningsOf(status).filter((finding) => finding.level !== "down"); // those stand above each view
  const tone = { healthy: "good", degraded: "warn", down: "bad", unreachable: "bad" }[status.state] ?? "idle";
  return html`<div class="summary">
    <p>
      <${State} tone=${tone}>${status.state}</${State}>: ${count(status.hosts.length, "host")}, ${count(up("gateway"), "gateway")}, ${count(up("scheduler"), "scheduler")}, ${count(up("worker"), "worker")}, ${count(status.models.length, "model")}
    </p>
    ${warnings.slice(0, 3).map((finding) => html`<${Problem} key=${keyOf(finding)} finding=${finding} />`)}
    ${warnings.length > 3 ? html`<p><a href=${link(["topology"])}>${warnings.length - 3} more</a></p>` : null}
  </div>`;
}

/** Who has how many requests in flight at the queues of `model`, or of all models; nothing without an access policy. */
function Callers({ queues, model }) {
  const found = new Map();
  for (const queue of queues ?? []) {
    if (model && model !== (queue.namespace ? `${queue.namespace}::${queue.model}` : queue.model)) continue;
    for (const caller of queue.callers ?? []) {
      const row = found.get(caller.name) ?? { inFlight: 0, refused: 0 };
      found.set(caller.name, { inFlight: row.inFlight + caller.in_flight, refused: row.refused + caller.refused });
    }
  }
  if (!found.size) return null;
  const rows = [...found].sort(([a, one], [b, other]) => other.inFlight - one.inFlight || other.refused - one.refused || a.localeCompare(b)).slice(0, BUSIEST);
  return html`<${PlainTable} label="Callers">
    <thead><tr><th>Caller</th><th class="number">In flight</th><th class="number">Refused</th></tr></thead>
    <tbody>${rows.map(([name, row]) => html`<tr key=${name}><td>${name}</td><td class="number">${number(row.inFlight)}</td><td class="number">${number(row.refused)}</td></tr>`)}</tbody>
  </${PlainTable}>`;
}

function Busiest({ models }) {
  const rows = useMemo(() => [...(models ?? [])].filter((model) => model.loaded).sort((a, b) => (b.requests_per_s ?? 0) - (a.requests_per_s ?? 0) || a.name.localeCompare(b.name)).slice(0, BUSIEST), [models]);
  const columns = useMemo(
    () => [
      { title: "Busiest models", field: "name", formatter: cells.link((row) => link(["models", row.id])), minWidth: 140, widthGrow: 3, longest: 320 },
      numeric("Requests/s", "requests_per_s", decimal),
      numeric("Failures/s", "failures_per_s", decimal, { responsive: 2 }),
      numeric("Median", "p50_ms", milliseconds, { responsive: 2 }),
      numeric("p99", "p99_ms", milliseconds),
      numeric("Waiting", "queue_depth", number, { responsive: 3 }),
      numeric("Batch", "batch_size", decimal, { responsive: 4 }),
      { title: "Busy", field: "utilization", formatter: cells.share(percent), sorter: "number", responsive: 3 },
    ],
    [],
  );
  if (!models) return null;
  return html`<${Table} label="Busiest models" columns=${columns} rows=${rows} rowKey="id" sort=${[{ column: "requests_per_s", dir: "desc" }]} maxHeight="none" empty="No model is loaded" onOpen=${(row) => replaceQuery({ model: row.id })} />`;
}
