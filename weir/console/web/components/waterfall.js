// `Waterfall`: the way of a request as bars over time, a custom series of ECharts.

import { html, useMemo } from "../core/html.js";
import { microseconds } from "../core/format.js";
import { Chart, isCalm, tooltipNode, tooltipStyle, useColours } from "./chart.js";

const ROW_PX = 26;

/** What the spans of a request mean, by name. */
const MEANINGS = {
  read: "the gateway reads the request",
  check: "the gateway checks it and sends it to the model's queue",
  queue: "it waits in the scheduler until its batch leaves",
  "to the worker": "the batch travels to the worker",
  "wait for the instance": "the batch waits until the instance is free",
  input: "the instance joins the inputs of the batch",
  compute: "the model runs",
  output: "the instance splits the outputs and packs them",
  "to the gateway": "the response travels to the gateway",
  answer: "the gateway answers the client",
};

/** Bars of `spans`, `[{name, start_us, end_us}]`, from the earliest start on. `label` describes the picture. */
export function Waterfall({ spans, label }) {
  const palette = useColours();
  const rows = useMemo(() => [...spans].sort((a, b) => a.start_us - b.start_us), [spans]);
  const option = useMemo(() => waterfallOption(rows, palette), [rows, palette]);
  if (!rows.length) return null;
  const first = Math.min(...rows.map((span) => span.start_us));
  const total = Math.max(...rows.map((span) => span.end_us)) - first;
  const text = rows.map((span) => `${span.name} ${microseconds(span.end_us - span.start_us)}`).join(", ");
  return html`<figure class="waterfall">
    <${Chart} key=${rows.length} option=${option} height="${rows.length * ROW_PX + 34}px" label="${label}: ${text}; ${microseconds(total)} in all" />
  </figure>`;
}

function waterfallOption(rows, palette) {
  const first = Math.min(...rows.map((span) => span.start_us));
  const last = Math.max(...rows.map((span) => span.end_us));
  const total = Math.max(1, last - first);
  const names = [...new Set(rows.map((span) => span.name))];
  return {
    animation: !isCalm.matches,
    animationDuration: 250,
    grid: { left: 8, right: 8, top: 4, bottom: 24 },
    tooltip: {
      ...tooltipStyle(palette),
      formatter: ({ dataIndex }) => {
        const span = rows[dataIndex];
        return tooltipNode(
          span.name,
          [
            ["takes", microseconds(span.end_us - span.start_us)],
            ["begins after", microseconds(span.start_us - first)],
            ["share", `${Math.round(((span.end_us - span.start_us) / total) * 100)} %`],
          ],
          MEANINGS[span.name] ?? "",
        );
      },
    },
    xAxis: {
      type: "value",
      min: 0,
      max: total,
      axisLine: { show: false },
      axisTick: { show: false },
      axisLabel: { color: palette.muted, fontSize: 11, formatter: (value) => microseconds(value), hideOverlap: true },
      splitLine: { lineStyle: { color: palette.line } },
    },
    yAxis: { type: "value", min: -0.5, max: rows.length - 0.5, inverse: true, show: false },
    series: [
      {
        type: "custom",
        data: rows.map((span, place) => [span.start_us - first, span.end_us - first, place]),
        encode: { x: [0, 1], y: 2 },
        renderItem: (parameters, api) => {
          const span = rows[parameters.dataIndex];
          const [left, middle] = api.coord([api.value(0), api.value(2)]);
          const [right] = api.coord([api.value(1), api.value(2)]);
          const width = Math.max(2, right - left);
          const area = parameters.coordSys;
          const caption = `${span.name}  ${microseconds(span.end_us - span.start_us)}`;
          const isInside = width > caption.length * 6.6;
          const fitsRight = right + caption.length * 6.6 < area.x + area.width;
          const x = isInside ? left + 6 : fitsRight ? right + 6 : left - 6;
          return {
            type: "group",
            children: [
              {
                type: "rect",
                shape: { x: left, y: middle - 9, width, height: 18, r: 3 },
                style: { fill: palette.series[names.indexOf(span.name) % palette.series.length] },
              },
              {
                type: "text",
                style: {
                  text: caption,
                  x,
                  y: middle,
                  align: isInside || fitsRight ? "left" : "right",
                  verticalAlign: "middle",
                  fill: isInside ? palette.panel : palette.ink,
                  font: `12px ${palette.font}`,
                },
              },
            ],
          };
        },
      },
    ],
  };
}
