// The picture of the topology: a band for each host; gateways, schedulers and workers from left to right; a line from the
// scheduler that owns a queue to the workers that serve its model. A dot under a worker is an instance, filled while it runs.

import { count, percent } from "../core/format.js";
import { html, useLayoutEffect, useMemo, useRef, useState } from "../core/html.js";
import { Chart, isCalm, tooltipNode, tooltipStyle, useColours } from "../components/chart.js";

const ROW_PX = 54;
const TITLE_PX = 20;
const GAP_PX = 10;
const COLUMN_PX = 128;
const MAX_EDGES = 1500;

/** The picture of a status; `onChoose(id)` is called for the process that was clicked. */
export function TopologyPicture({ status, chosen, onChoose }) {
  const palette = useColours();
  const place = useRef(null);
  const [width, setWidth] = useState(900);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.round(entry.contentRect.width)));
    observer.observe(place.current);
    return () => observer.disconnect();
  }, []);
  const picture = useMemo(() => arranged(status, width), [status, width]);
  const option = useMemo(() => graphOption(picture, palette, chosen), [picture, palette, chosen]);
  const on = { click: (event) => event.dataType === "node" && onChoose(event.data.id) };
  const up = status.roles.filter((role) => role.state === "up").length;
  const label = `${count(status.hosts.length, "host")} with ${count(status.roles.length, "process", "processes")}, ${up} of them up. The table below has the same processes.`;
  return html`<div class="picture" ref=${place}><${Chart} option=${option} height="${picture.height}px" on=${on} replaced=${["series"]} label=${label} /></div>`;
}

/** Where everything lies, in pixels: `{width, height, bands, nodes, edges}`. */
export function arranged(status, width) {
  const isNarrow = width < 560;
  const left = isNarrow ? 42 : 90;
  const middle = Math.round(width * (isNarrow ? 0.42 : 0.36));
  const right = Math.round(width * (isNarrow ? 0.68 : 0.56));
  const room = Math.max(1, Math.floor((width - right) / (isNarrow ? 70 : COLUMN_PX)));
  const hosts = new Map();
  for (const role of status.roles) {
    if (!hosts.has(role.host)) hosts.set(role.host, { id: role.host, name: role.host_name || role.host, roles: [] });
    hosts.get(role.host).roles.push(role);
  }
  const bands = [];
  const nodes = new Map();
  let top = 0;
  for (const host of hosts.values()) {
    const doors = host.roles.filter((role) => role.role !== "scheduler" && role.role !== "worker");
    const schedulers = host.roles.filter((role) => role.role === "scheduler");
    const workers = host.roles.filter((role) => role.role === "worker");
    const needed = Math.max(doors.length, schedulers.length, 1);
    const columns = Math.min(room, Math.max(1, Math.ceil(workers.length / needed)));
    const rows = Math.max(needed, Math.ceil(workers.length / columns));
    const height = TITLE_PX + rows * ROW_PX;
    bands.push({ name: host.name, top, height });
    const put = (role, x, row, of) => {
      // A column with fewer processes is centred in its band.
      const y = top + TITLE_PX + (row + 0.5 + (rows - of) / 2) * ROW_PX - 12;
      nodes.set(role.id, { role, x, y });
    };
    doors.forEach((role, row) => put(role, left, row, doors.length));
    schedulers.forEach((role, row) => put(role, middle, row, schedulers.length));
    const workerRows = Math.ceil(workers.length / columns);
    workers.forEach((role, place) => put(role, right + ((place % columns) + 0.5) * ((width - right) / columns), Math.floor(place / columns), workerRows));
    top += height + GAP_PX;
  }
  return { width, height: Math.max(top, 60), bands, nodes, edges: edgesOf(status, nodes), isNarrow };
}

function edgesOf(status, nodes) {
  const edges = new Map();
  const add = (source, target, model) => {
    if (!nodes.has(source) || !nodes.has(target)) return;
    const key = `${source}\n${target}`;
    if (!edges.has(key)) edges.set(key, { source, target, models: [] });
    if (model) edges.get(key).models.push(model);
  };
  const served = new Map(status.models.map((model) => [`${model.namespace}/${model.name}`, model.workers]));
  const owners = new Set();
  for (const queue of status.queues) {
    if (!queue.owner) continue;
    owners.add(queue.owner);
    for (const worker of served.get(`${queue.namespace}/${queue.model}`) ?? []) add(queue.owner, worker, queue.model);
  }
  for (const role of status.roles) if (role.role === "gateway" && role.state !== "silent") for (const owner of owners) add(role.id, owner, "");
  return [...edges.values()].slice(0, MAX_EDGES);
}

const MARKS = { gateway: "roundRect", durable: "rect", console: "triangle", scheduler: "diamond", worker: "circle" };
const MAX_DOTS = 16;
const DOT_PX = 7;

function graphOption({ width, height, bands, nodes, edges, isNarrow }, palette, chosen) {
  const tones = { up: palette.accent, draining: palette.warn, leaving: palette.warn, silent: palette.bad };
  const many = nodes.size > 30;
  return {
    animation: !isCalm.matches,
    animationDurationUpdate: 300,
    grid: { left: 0, right: 0, top: 0, bottom: 0 },
    xAxis: { type: "value", min: 0, max: width, show: false },
    yAxis: { type: "value", min: 0, max: height, inverse: true, show: false },
    tooltip: { ...tooltipStyle(palette), trigger: "item", formatter: (point) => describe(point, palette) },
    series: [
      {
        id: "hosts",
        type: "custom",
        silent: true,
        animation: false,
        data: bands.map((band) => [0, band.top, band.height]),
        renderItem: (parameters, api) => {
          const band = bands[parameters.dataIndex];
          const [x, y] = api.coord([0, band.top]);
          return {
            type: "group",
            children: [
              { type: "rect", shape: { x: x + 0.5, y: y + 0.5, width: width - 1, height: band.height - 1, r: 6 }, style: { fill: palette.soft, stroke: palette.line, lineWidth: 1 } },
              { type: "text", style: { text: band.name, x: x + 9, y: y + 8, fill: palette.muted, font: `11px ${palette.font}` } },
            ],
          };
        },
      },
      {
        id: "instances",
        type: "scatter",
        silent: true,
        animation: false,
        symbolSize: 5,
        z: 4,
        data: [...nodes.values()].flatMap(({ role, x, y }) => dots(role, x, y + 29, palette)),
      },
      {
        id: "processes",
        type: "graph",
        coordinateSystem: "cartesian2d",
        layout: "none",
        z: 3,
        edgeSymbol: ["none", "none"],
        emphasis: { focus: "adjacency", lineStyle: { width: 2, opacity: 1 } },
        blur: { itemStyle: { opacity: 0.25 }, lineStyle: { opacity: 0.05 } },
        label: { show: true, position: "bottom", distance: 3, color: palette.ink, fontSize: 11, fontFamily: palette.font },
        data: [...nodes.values()].map(({ role, x, y }) => ({
          id: role.id,
          name: role.id,
          value: [x, y],
          role,
          symbol: MARKS[role.role],
          symbolSize: role.role === "worker" ? Math.min(24, 12 + Math.sqrt(role.instances)) : role.role === "scheduler" ? 18 : [22, 13],
          itemStyle: {
            color: role.state === "up" ? (role.role === "worker" && role.utilization !== null ? mixed(palette.panel, palette.accent, 0.25 + 0.75 * role.utilization) : palette.accent) : tones[role.state],
            borderColor: role.id === chosen ? palette.ink : tones[role.state],
            borderWidth: role.id === chosen ? 3 : 1.5,
          },
          label: { formatter: labelOf(role, many || isNarrow), color: role.state === "up" ? palette.ink : tones[role.state] },
        })),
        links: edges.map((edge) => ({
          source: edge.source,
          target: edge.target,
          models: edge.models,
          lineStyle: { color: palette.muted, width: edge.models.length ? Math.min(3, 0.8 + edge.models.length / 20) : 0.8, type: edge.models.length ? "solid" : "dashed", opacity: many ? 0.12 : 0.5, curveness: 0.08 },
        })),
      },
    ],
  };
}

function dots({ role, instances, busy, state }, x, y, palette) {
  if (role !== "worker" || state === "silent") return [];
  const shown = Math.min(MAX_DOTS, instances);
  const running = Math.round((busy / Math.max(1, instances)) * shown);
  return Array.from({ length: shown }, (_, place) => ({
    value: [x + (place - (shown - 1) / 2) * DOT_PX, y],
    itemStyle: place < running ? { color: palette.series[1] } : { color: palette.panel, borderColor: palette.muted, borderWidth: 1 },
  }));
}

function labelOf(role, isShort) {
  const end = role.id.slice(-4);
  const state = role.state === "up" ? "" : ` ${role.state}`;
  if (isShort) return `${role.role === "worker" ? "" : `${role.role} `}${end}${state}`;
  if (state) return `${role.role} ${end} ·${state}`;
  return `${role.role} ${end}${role.role === "worker" ? ` · ${count(role.instances, "instance")}` : ""}${role.role === "scheduler" ? ` · ${count(role.queues, "queue")}` : ""}`;
}

function describe(point, palette) {
  if (point.dataType === "edge") {
    const { models } = point.data;
    if (!models.length) return tooltipNode("Requests and responses", []);
    const more = models.length > 8 ? `and ${models.length - 8} more` : "";
    return tooltipNode(`Batches of ${count(models.length, "model")}`, models.slice(0, 8).map((name) => [name, ""]), more);
  }
  const { role } = point.data ?? {};
  if (!role) return "";
  const rows = [
    ["state", role.state],
    ["host", role.host_name || role.host],
    ["process", String(role.pid)],
  ];
  if (role.role === "worker") rows.push(["models", String(role.models)], ["instances", `${role.instances}, ${role.busy} busy`], ["busy", percent(role.utilization)]);
  if (role.role === "scheduler") rows.push(["queues", String(role.queues)]);
  return tooltipNode(`${role.role} ${role.id}`, rows);
}

/** A colour between two of the form #rrggbb; `share` of the second. */
function mixed(first, second, share) {
  const parse = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const [a, b] = [parse(first), parse(second)];
  return `rgb(${a.map((value, place) => Math.round(value + (b[place] - value) * share)).join(", ")})`;
}
