// `SequenceChart`: a sound and, under the same time, what the model answered for each of its chunks.

import { number } from "../core/format.js";
import { html, useMemo } from "../core/html.js";
import { Chart, tooltipNode, tooltipStyle, useColours } from "./chart.js";

const POINTS = 600;

/** `values` has one number for each chunk of `chunk` samples of `samples` at `rate`; `name` is the output's. */
export function SequenceChart({ values, samples, rate, chunk, name }) {
  const palette = useColours();
  const option = useMemo(() => {
    const step = Math.max(1, Math.floor(samples.length / POINTS));
    const envelope = [];
    for (let at = 0; at < samples.length; at += step) {
      let high = 0;
      for (let place = at; place < Math.min(samples.length, at + step); place += 1) high = Math.max(high, Math.abs(samples[place]));
      envelope.push([at / rate, high]);
    }
    const label = { color: palette.muted, fontSize: 11, fontFamily: palette.font };
    return {
      animation: false,
      grid: [
        { left: 36, right: 10, top: 6, height: 44, outerBoundsMode: "none" },
        { left: 36, right: 10, top: 60, height: 90, outerBoundsMode: "none" },
      ],
      tooltip: { ...tooltipStyle(palette), trigger: "axis", formatter: (points) => tooltipNode(`${points[0].value[0].toFixed(2)} s`, points.filter((point) => point.seriesIndex === 2).map((point) => [name, number(point.value[1])])) },
      axisPointer: { link: [{ xAxisIndex: "all" }] },
      xAxis: [0, 1].map((place) => ({ gridIndex: place, type: "value", min: 0, max: samples.length / rate, axisLabel: { ...label, show: place === 1, formatter: (value) => `${Number(value.toFixed(2))} s`, hideOverlap: true }, splitLine: { show: false }, axisTick: { show: false }, axisLine: { onZero: false, lineStyle: { color: palette.line } } })),
      yAxis: [
        { gridIndex: 0, type: "value", min: -1, max: 1, show: false },
        { gridIndex: 1, type: "value", axisLine: { show: false }, min: 0, max: Math.max(1, ...values), splitNumber: 2, axisLabel: label, splitLine: { lineStyle: { color: palette.line } } },
      ],
      series: [
        { type: "line", data: envelope, showSymbol: false, lineStyle: { width: 0 }, areaStyle: { color: palette.muted, opacity: 0.5, origin: 0 }, silent: true },
        { type: "line", data: envelope.map(([at, high]) => [at, -high]), showSymbol: false, lineStyle: { width: 0 }, areaStyle: { color: palette.muted, opacity: 0.5, origin: 0 }, silent: true },
        { type: "line", name, xAxisIndex: 1, yAxisIndex: 1, step: "start", data: values.map((value, at) => [((at + 1) * chunk) / rate, value]), showSymbol: false, lineStyle: { width: 1.5, color: palette.accent }, itemStyle: { color: palette.accent }, areaStyle: { color: palette.accent, opacity: 0.15 } },
      ],
    };
  }, [values, palette]);
  const most = values.reduce((a, b) => Math.max(a, b), 0);
  return html`<section class="sequence"><h3>${name} over the sound</h3><${Chart} option=${option} height="180px" label="${name} for ${values.length} chunks, at most ${number(most)}" /></section>`;
}
