// The charts of the load, and the part of the series that a time range shows.

import { gibibytes, milliseconds, number, percent, seconds } from "../core/format.js";
import { html, useMemo } from "../core/html.js";
import { useSeries } from "../core/series.js";
import { LineChart } from "../components/line_chart.js";

/** The charts of a view: of all models, or of one. */
export function chartsOf(isAll) {
  const charts = [
    {
      title: "Requests",
      format: perSecond,
      lines: [
        { name: "requests", column: "requests_per_s", isArea: true },
        { name: "failures", column: "failures_per_s", tone: "bad", isArea: true },
      ],
    },
    {
      title: "Latency",
      format: milliseconds,
      lines: [
        { name: "median", column: "p50_ms" },
        { name: "p99", column: "p99_ms" },
      ],
    },
    {
      title: "Queue",
      format: number,
      secondFormat: seconds,
      lines: [{ name: "waiting", column: "queue_depth", isArea: true }, { name: "oldest", column: "queue_oldest_s", isSecond: true }],
    },
    { title: "Batch size", format: number, lines: [{ name: "requests in a batch", column: "batch_size", isArea: true }] },
    {
      title: "Busy",
      format: percent,
      max: 1,
      interval: 0.25,
      lines: [{ name: "instances", column: "utilization", isArea: true }, ...(isAll ? [{ name: "CPU", column: "cpu_utilization" }, { name: "GPU", column: "gpu_utilization" }] : [])],
    },
  ];
  if (isAll) charts.push({ title: "Memory", format: gibibytes, scale: 2 ** -30, lines: [{ name: "processes", column: "memory_bytes", isArea: true }, { name: "GPU", column: "gpu_memory_bytes" }] });
  return charts;
}

function perSecond(value) {
  return `${number(value)}/s`;
}


/** The last `spanMs` of a model's charts. */
export function ModelCharts({ model, spanMs = 300_000 }) {
  const series = useSeries(model);
  const shown = useMemo(() => (series.fine ? { ...series.fine } : null), [series.fine, series.atMs]);
  const charts = useMemo(() => chartsOf(false).slice(0, 4), []);
  const now = series.atMs || Date.now();
  const range = useMemo(() => ({ fromMs: now - spanMs, toMs: now }), [now, spanMs]);
  return html`<div class="charts">${charts.map((chart) => html`<${LineChart} key=${chart.title} ...${chart} columns=${shown} range=${range} height="120px" />`)}</div>`;
}
