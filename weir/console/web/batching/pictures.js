// The pictures of the batching view as options of ECharts.
//
// Batches: a column for each batch, the newest at the right. Above the line its rows are stacked, coloured by how long each
// request waited, and padding is grey; below the line hangs how long each request waited, down to the first one, which waited
// longest. Dashed lines are max_batch_size and max_queue_delay. Instances: when each instance ran which batch.

import { tooltipNode, tooltipStyle } from "../components/chart.js";
import { clock, microseconds, shortId } from "../core/format.js";
import { duration, REASONS, sizesOf } from "./explain.js";

const MAX_CELLS = 64;

/** The picture of batches. `slots` is how many columns there is room for. */
export function batchOption(batches, settings, slots, palette) {
  const shown = batches.slice(-slots);
  const most = Math.max(1, settings?.max_batch_size ?? 1);
  const delayUs = settings?.max_queue_delay_us ?? 0;
  const longestUs = Math.max(delayUs * 1.15, ...shown.map((batch) => batch.held_us), 100);
  const highest = Math.max(most, ...shown.map((batch) => batch.rows + batch.padding));
  const offset = slots - shown.length;
  const label = { color: palette.muted, fontSize: 11, fontFamily: palette.font };
  const colourOf = (waitedUs) => palette.waits[Math.min(palette.waits.length - 1, Math.floor((waitedUs / longestUs) * palette.waits.length))];
  const axis = { axisLine: { show: false }, axisTick: { show: false }, splitLine: { show: false } };
  const mark = (value, text, position) => ({
    silent: true,
    symbol: "none",
    animation: false,
    lineStyle: { color: palette.ink, type: [5, 4], width: 1, opacity: 0.7 },
    label: { formatter: text, position, color: palette.ink, fontSize: 11, fontFamily: palette.font, backgroundColor: palette.ground, padding: [1, 3] },
    data: [{ yAxis: value }],
  });
  return {
    animation: false,
    grid: [
      { left: 52, right: 12, top: 20, height: 190, outerBoundsMode: "none" },
      { left: 52, right: 12, top: 216, height: 120, outerBoundsMode: "none" },
    ],
    tooltip: {
      ...tooltipStyle(palette),
      trigger: "item",
      formatter: ({ dataIndex }) => describe(shown[dataIndex], palette),
    },
    xAxis: [0, 1].map((place) => ({ gridIndex: place, type: "value", min: 0, max: slots, show: false })),
    yAxis: [
      { gridIndex: 0, type: "value", min: 0, max: highest, interval: Math.max(1, Math.ceil(highest / 4)), name: "rows", nameLocation: "middle", nameGap: 34, nameTextStyle: label, axisLabel: { ...label, formatter: (value) => (Number.isInteger(value) ? value : "") }, ...axis },
      { gridIndex: 1, type: "value", min: 0, max: longestUs, inverse: true, splitNumber: 3, name: "waited", nameLocation: "middle", nameGap: 34, nameTextStyle: label, axisLabel: { ...label, showMaxLabel: false, formatter: (value) => (value ? shortDuration(value) : "") }, ...axis },
    ],
    series: [
      {
        id: "rows",
        type: "custom",
        xAxisIndex: 0,
        yAxisIndex: 0,
        data: shown.map((batch, place) => [offset + place, batch.rows + batch.padding]),
        renderItem: (parameters, api) => stack(shown[parameters.dataIndex], api, colourOf, palette),
        markLine: mark(most, `max_batch_size ${most}`, "insideStartTop"),
      },
      {
        id: "waits",
        type: "custom",
        xAxisIndex: 1,
        yAxisIndex: 1,
        data: shown.map((batch, place) => [offset + place, batch.held_us]),
        renderItem: (parameters, api) => hanging(shown[parameters.dataIndex], api, colourOf, palette),
        ...(delayUs > 0 ? { markLine: mark(delayUs, `max_queue_delay ${duration(delayUs)}`, "insideStartBottom") } : { markLine: { data: [] } }),
      },
    ],
  };
}

function shortDuration(us) {
  return microseconds(us).replace(/(\.\d)\d+/, "$1");
}

/** The rows of a batch as cells, one for each request; at most `MAX_CELLS`, so that large batches stay cheap to draw. */
function stack(batch, api, colourOf, palette) {
  const [left, bottom] = api.coord([api.value(0), 0]);
  const [unit] = api.size([1, 1]);
  const width = Math.max(2, unit - Math.min(4, unit * 0.2));
  const children = [];
  const requests = Math.max(1, batch.waited_us.length);
  // A report lists the first 64 requests; the others are drawn as if they were like those.
  const listed = batch.request_rows.reduce((total, rows) => total + rows, 0);
  const scale = listed ? batch.rows / listed : 0;
  const ends = [0];
  for (const rows of batch.request_rows) ends.push(ends.at(-1) + rows * scale);
  const cells = Math.min(requests, MAX_CELLS);
  for (let cell = 0; cell < cells; cell += 1) {
    const from = Math.floor((cell * requests) / cells);
    const to = Math.floor(((cell + 1) * requests) / cells);
    const top = api.coord([api.value(0), ends[to]])[1];
    const base = api.coord([api.value(0), ends[from]])[1];
    const gap = base - top > 3 ? 1 : 0;
    children.push({ type: "rect", shape: { x: left, y: top + gap, width, height: Math.max(1, base - top - gap) }, style: { fill: colourOf(batch.waited_us[from] ?? 0) } });
  }
  if (batch.padding) {
    const top = api.coord([api.value(0), batch.rows + batch.padding])[1];
    const base = api.coord([api.value(0), batch.rows])[1];
    children.push({ type: "rect", shape: { x: left, y: top + 1, width, height: Math.max(1, base - top - 1) }, style: { fill: palette.line, stroke: palette.muted, lineWidth: 0.5 } });
  }
  children.push({ type: "rect", shape: { x: left, y: bottom, width, height: 1 }, style: { fill: palette.muted } });
  return { type: "group", children };
}

/** How long each request of a batch waited, as a bar to the first one's wait with a mark for each other. */
function hanging(batch, api, colourOf) {
  const [left, top] = api.coord([api.value(0), 0]);
  const [unit] = api.size([1, 1]);
  const width = Math.max(2, unit - Math.min(4, unit * 0.2));
  const end = api.coord([api.value(0), batch.held_us])[1];
  const children = [{ type: "rect", shape: { x: left + width / 2 - 1, y: top, width: 2, height: Math.max(1, end - top) }, style: { fill: colourOf(batch.held_us), opacity: 0.45 } }];
  const step = Math.ceil(batch.waited_us.length / MAX_CELLS);
  for (let place = 0; place < batch.waited_us.length; place += step) {
    const waited = batch.waited_us[place];
    const y = api.coord([api.value(0), waited])[1];
    children.push({ type: "rect", shape: { x: left, y: y - 1, width, height: 2 }, style: { fill: colourOf(waited) } });
  }
  return { type: "group", children };
}

function describe(batch, palette) {
  if (!batch) return "";
  const rows = [
    ["formed at", clock(batch.at_ms)],
    ["requests", String(batch.size)],
    ["rows", batch.padding ? `${batch.rows} and ${batch.padding} of padding` : String(batch.rows)],
    ["first waited", microseconds(batch.held_us)],
    ["ran for", batch.busy_us === null ? "still runs" : microseconds(batch.busy_us)],
    ["instance", `${batch.instance} on ${shortId(batch.worker)}`],
    ["version", String(batch.version)],
  ];
  return tooltipNode(`Batch ${batch.id}`, rows, batch.reason ? `It left because ${REASONS[batch.reason] ?? batch.reason}.` : "");
}

/** How many batches there were of each size. */
export function sizeOption(batches, settings, palette) {
  const most = Math.max(1, settings?.max_batch_size ?? 1, ...batches.map((batch) => batch.rows));
  const counts = sizesOf(batches, most);
  const label = { color: palette.muted, fontSize: 11, fontFamily: palette.font };
  return {
    animation: false,
    grid: { left: 4, right: 4, top: 8, bottom: 0, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    tooltip: { ...tooltipStyle(palette), trigger: "axis", formatter: ([point]) => tooltipNode(`${point.name} ${point.name === "1" ? "row" : "rows"}`, [["batches", String(point.value)]]) },
    xAxis: { type: "category", data: counts.map((_, place) => String(place + 1)), axisLabel: label, axisTick: { show: false }, axisLine: { lineStyle: { color: palette.line } } },
    yAxis: { type: "value", minInterval: 1, splitNumber: 3, axisLabel: label, splitLine: { lineStyle: { color: palette.line } } },
    series: [{ type: "bar", data: counts, barCategoryGap: "15%", itemStyle: { color: palette.accent } }],
  };
}

/** When each instance ran which batch, over the last `spanMs`. */
export function instanceOption(batches, nowMs, spanMs, palette) {
  const lanes = [...new Set(batches.map((batch) => `${batch.worker} ${batch.instance}`))].sort();
  const label = { color: palette.muted, fontSize: 11, fontFamily: palette.font };
  const bars = batches.filter((batch) => batch.at_ms > nowMs - spanMs);
  return {
    lanes: lanes.length,
    option: {
      animation: false,
      grid: { left: 100, right: 12, top: 4, bottom: 22, outerBoundsMode: "none" },
      tooltip: { ...tooltipStyle(palette), formatter: ({ dataIndex }) => describe(bars[dataIndex], palette) },
      xAxis: { type: "value", min: -spanMs / 1000, max: 0, axisLabel: { ...label, formatter: (value) => (value ? `${value} s` : "now") }, splitLine: { lineStyle: { color: palette.line } } },
      yAxis: { type: "category", data: lanes, inverse: true, axisLabel: { ...label, formatter: (lane) => `…${lane.split(" ")[0].slice(-6)} ${lane.slice(lane.indexOf(" ") + 1)}`, width: 92, overflow: "truncate" }, axisTick: { show: false }, axisLine: { show: false } },
      series: [
        {
          id: "runs",
          type: "custom",
          data: bars.map((batch) => {
            const start = (batch.at_ms - nowMs) / 1000;
            return [start, lanes.indexOf(`${batch.worker} ${batch.instance}`), Math.min(0, start + (batch.busy_us ?? (nowMs - batch.at_ms) * 1000) / 1e6)];
          }),
          encode: { x: [0, 2], y: 1 },
          renderItem: (parameters, api) => {
            const batch = bars[parameters.dataIndex];
            const [left, middle] = api.coord([api.value(0), api.value(1)]);
            const [right] = api.coord([api.value(2), api.value(1)]);
            const area = parameters.coordSys;
            const x = Math.max(area.x, left);
            return { type: "rect", shape: { x, y: middle - 7, width: Math.max(1.5, right - x), height: 14, r: 1 }, style: { fill: palette.series[batch.busy_us === null ? 1 : 0], opacity: 0.35 + 0.65 * Math.min(1, batch.rows / Math.max(1, batch.rows + batch.padding)) } };
          },
        },
      ],
    },
  };
}
