// `LineChart`: curves over time. Dragging over it chooses a range; all charts of a view show the same one.

import { html, useMemo, useRef } from "../core/html.js";
import { clock } from "../core/format.js";
import { Chart, tooltipNode, tooltipStyle, useColours } from "./chart.js";

/**
 * `lines` is `[{name, column, format, isArea, isSecond, tone}]`: columns of `columns` (see core/series.js). `range` is
 * `{fromMs, toMs}`. `onRange(fromMs, toMs)` is called when a range was dragged. `max` is the least upper end of the axis,
 * `interval` the distance of its lines, `scale` the factor from a column's values to what is shown.
 */
export function LineChart({ title, columns, lines, range, onRange, format, secondFormat = null, max = null, interval = null, scale = 1, height = "150px" }) {
  const palette = useColours();
  const chartRef = useRef(null);
  const option = useMemo(() => lineOption({ columns, lines, range, format, secondFormat, max, interval, scale, palette }), [columns, range.fromMs, range.toMs, palette]);
  const last = lines.map((line) => `${line.name} ${(line.isSecond ? secondFormat : format)(scaled(latest(columns, line.column), scale))}`).join(", ");
  const on = {
    datazoom: (event, chart) => {
      const chosen = event.batch?.[0];
      if (chosen?.startValue === undefined) return;
      chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 }, { silent: true });
      onRange?.(Math.round(chosen.startValue), Math.round(chosen.endValue));
    },
  };
  const onReady = (chart) => {
    chartRef.current = chart;
    if (onRange) chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
  };
  return html`<section class="line-chart">
    <header>
      <h2 class="small-head">${title}</h2>
      <p class="legend">
        ${lines.map(
          (line, place) => html`<span key=${line.name} style="--key: ${colourOf(line, place, palette)}">${line.name} <b>${(line.isSecond ? secondFormat : format)(scaled(latest(columns, line.column), scale))}</b></span>`,
        )}
      </p>
    </header>
    <${Chart} option=${option} height=${height} on=${on} onReady=${onReady} label="${title}: ${last}" />
  </section>`;
}

/** The newest value of a column, null if it is unknown. */
export function latest(columns, name) {
  return columns?.[name]?.at(-1) ?? null;
}

function scaled(value, scale) {
  return value === null ? null : value * scale;
}

function colourOf(line, place, palette) {
  return line.tone ? palette[line.tone] : palette.series[place % palette.series.length];
}

function lineOption({ columns, lines, range, format, secondFormat, max, interval, scale, palette }) {
  const at = columns?.at_ms ?? [];
  const from = Math.max(0, at.findIndex((time) => time >= range.fromMs - (columns?.stepMs ?? 0)));
  const axis = {
    type: "value",
    min: 0,
    splitNumber: 3,
    axisLine: { show: false },
    axisTick: { show: false },
    splitLine: { lineStyle: { color: palette.line } },
  };
  const upper = max === null ? null : (extent) => Math.max(max, extent.max);
  const label = { color: palette.muted, fontSize: 11, fontFamily: palette.font };
  return {
    animation: false,
    grid: { left: 4, right: secondFormat ? 4 : 10, top: 8, bottom: 2, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    tooltip: {
      ...tooltipStyle(palette),
      trigger: "axis",
      axisPointer: { type: "line", lineStyle: { color: palette.muted } },
      formatter: (points) => {
        const rows = points.map((point) => {
          const line = lines[point.seriesIndex];
          return [line.name, (line.isSecond ? secondFormat : format)(point.value[1]), point.color];
        });
        return tooltipNode(clock(points[0].value[0]), rows);
      },
    },
    toolbox: { show: true, itemSize: 0, top: -40, feature: { dataZoom: { yAxisIndex: "none", title: { zoom: "", back: "" }, brushStyle: { color: palette.accent, opacity: 0.15 } } } },
    xAxis: {
      type: "time",
      min: range.fromMs,
      max: range.toMs,
      splitNumber: 4,
      axisLine: { lineStyle: { color: palette.line } },
      axisTick: { show: false },
      axisLabel: { ...label, hideOverlap: true, formatter: { day: "{HH}:{mm}", hour: "{HH}:{mm}", minute: "{HH}:{mm}", second: "{HH}:{mm}:{ss}", millisecond: "{HH}:{mm}:{ss}" } },
      splitLine: { show: false },
    },
    yAxis: [
      { ...axis, max: upper, ...(interval ? { interval } : {}), axisLabel: { ...label, formatter: format } },
      ...(secondFormat ? [{ ...axis, position: "right", splitLine: { show: false }, axisLabel: { ...label, formatter: secondFormat } }] : []),
    ],
    series: lines.map((line, place) => {
      const values = columns?.[line.column];
      const colour = colourOf(line, place, palette);
      return {
        id: line.name,
        type: "line",
        name: line.name,
        yAxisIndex: line.isSecond ? 1 : 0,
        showSymbol: false,
        symbol: "circle",
        symbolSize: 4,
        sampling: "lttb",
        lineStyle: { width: 1.5, color: colour, type: line.isSecond ? [4, 3] : "solid" },
        itemStyle: { color: colour },
        areaStyle: line.isArea ? { color: colour, opacity: 0.12 } : undefined,
        data: values ? at.slice(from).map((time, offset) => [time, scaled(values[from + offset] ?? null, scale)]) : [],
      };
    }),
  };
}
