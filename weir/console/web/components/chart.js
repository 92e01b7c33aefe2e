// `Chart`: an ECharts canvas. ECharts is loaded with the first chart.

import { html, useEffect, useRef, useState } from "../core/html.js";
import { drawLater, dropDrawing } from "../core/tasks.js";

let loading = null;

/** The module of ECharts. */
export function loadECharts() {
  loading ??= import("/web/vendor/echarts.esm.min.mjs");
  return loading;
}

export const isCalm = matchMedia("(prefers-reduced-motion: reduce)");

/** The colours of the theme, for canvases. */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    ink: read("--ink"),
    muted: read("--muted"),
    line: read("--line"),
    soft: read("--soft"),
    ground: read("--ground"),
    panel: read("--panel"),
    accent: read("--accent"),
    good: read("--good"),
    warn: read("--warn"),
    bad: read("--bad"),
    series: [1, 2, 3, 4, 5, 6].map((number) => read(`--series-${number}`)),
    waits: [0, 1, 2, 3, 4].map((number) => read(`--wait-${number}`)),
    font: read("--font"),
    mono: read("--mono"),
  };
}

/** The colours as state: changes with the theme. */
export function useColours() {
  const [current, setCurrent] = useState(colours);
  useEffect(() => {
    const listener = () => setCurrent(colours());
    document.addEventListener("themechange", listener);
    return () => document.removeEventListener("themechange", listener);
  }, []);
  return current;
}

/** A tooltip's content as a DOM node: rows of texts. */
export function tooltipNode(title, rows, note = "") {
  const node = document.createElement("div");
  node.className = "tip";
  const head = node.appendChild(document.createElement("b"));
  head.textContent = title;
  for (const [label, value, colour] of rows) {
    const row = node.appendChild(document.createElement("div"));
    const key = row.appendChild(document.createElement("span"));
    key.textContent = label;
    if (colour) key.style.setProperty("--key", colour);
    row.appendChild(document.createElement("span")).textContent = value;
  }
  if (note) node.appendChild(document.createElement("p")).textContent = note;
  return node;
}

/** The style of tooltips. */
export function tooltipStyle(palette) {
  return {
    confine: true,
    backgroundColor: palette.panel,
    borderColor: palette.line,
    borderWidth: 1,
    padding: [6, 9],
    textStyle: { color: palette.ink, fontSize: 12, fontFamily: palette.font },
    extraCssText: "box-shadow: 0 4px 16px rgb(0 0 0 / .18); border-radius: 6px;",
    transitionDuration: 0,
  };
}

/**
 * Draws `option`. A new option is merged into the chart in a task of its own; `replaced` names the parts that are replaced
 * instead (`["series"]`). `on` is handlers by event name, `onReady(chart)` runs once. `label` describes the picture.
 */
export function Chart({ option, replaced = null, label, height = "160px", on = {}, onReady = null, className = "" }) {
  const element = useRef(null);
  const held = useRef({ chart: null, option, on });
  held.current.on = on;
  held.current.option = option;
  useEffect(() => {
    let isOver = false;
    let observer = null;
    loadECharts().then((echarts) => {
      if (isOver || !element.current) return;
      const chart = echarts.init(element.current, null, { renderer: "canvas" });
      held.current.chart = chart;
      for (const name of Object.keys(held.current.on)) chart.on(name, (event) => held.current.on[name]?.(event, chart));
      drawLater(held, () => {
        chart.setOption(held.current.option);
        onReady?.(chart);
      });
      observer = new ResizeObserver(() => drawLater(observer, () => !chart.isDisposed() && chart.resize()));
      observer.observe(element.current);
    });
    return () => {
      isOver = true;
      dropDrawing(held);
      observer?.disconnect();
      if (observer) dropDrawing(observer);
      held.current.chart?.dispose();
      held.current.chart = null;
    };
  }, []);
  useEffect(() => {
    const { chart } = held.current;
    if (chart) drawLater(held, () => !chart.isDisposed() && chart.setOption(held.current.option, replaced ? { replaceMerge: replaced } : undefined));
  }, [option]);
  return html`<div class="chart ${className}" role="img" aria-label=${label} style="height: ${height}" ref=${element}></div>`;
}
