// `Table`: a Tabulator table. Cells are made with `cells.*`, which set texts as text; nothing is parsed as HTML.

import { html, useEffect, useLayoutEffect, useRef } from "../core/html.js";
import { drawLater, dropDrawing } from "../core/tasks.js";

let loading = null;

function loadTabulator() {
  loading ??= import("/web/vendor/tabulator_esm.min.mjs");
  return loading;
}

const SORT_EVERY_MS = 3000;

function element(kind, className, text) {
  const node = document.createElement(kind);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

/** Formatters of Tabulator. */
export const cells = {
  /** The value as text, made by `format(value, row)`. */
  text: (format = (value) => value ?? "–", className = "") => (cell) => element("span", className, format(cell.getValue(), cell.getData())),
  /** A link to `target(row)`. */
  link: (target, format = (value) => value) => (cell) => {
    const node = element("a", "cell-link", format(cell.getValue(), cell.getData()));
    node.href = target(cell.getData());
    node.tabIndex = -1;
    return node;
  },
  /** A state: a mark and a word. `tone(value, row)` is good, warn, bad or idle. */
  state: (tone, format = (value) => value) => (cell) => element("span", `state ${tone(cell.getValue(), cell.getData())}`, format(cell.getValue(), cell.getData())),
  /** A share of 1 as a bar with its text. */
  share: (format, tone = () => "") => (cell) => {
    const value = cell.getValue();
    const node = element("span", `bar ${tone(value)}`);
    if (value !== null && value !== undefined) node.style.setProperty("--share", `${Math.max(0, Math.min(1, value)) * 100}%`);
    node.append(element("span", "", format(value, cell.getData())));
    return node;
  },
  /** Buttons: `make(row)` returns `[{label, title, run}]`. */
  buttons: (make) => (cell) => {
    const node = element("span", "cell-buttons");
    for (const { label, title, run, disabled } of make(cell.getData())) {
      const button = node.appendChild(element("button", "small", label));
      button.type = "button";
      button.title = title;
      if (disabled) button.setAttribute("aria-disabled", "true");
      button.addEventListener("click", (event) => {
        event.stopPropagation();
        if (!disabled) run(button);
      });
    }
    return node;
  },
};

/** A column of numbers: right-aligned, unknown values last. */
export function numeric(title, field, format, more = {}) {
  return { title, field, hozAlign: "right", headerHozAlign: "right", sorter: unknownLast, formatter: cells.text(format, "number"), headerSortStartingDir: "desc", ...more };
}

function unknownLast(a, b, rowA, rowB, column, direction) {
  const isAUnknown = a === null || a === undefined;
  const isBUnknown = b === null || b === undefined;
  if (isAUnknown || isBUnknown) return (isAUnknown - isBUnknown) * (direction === "asc" ? 1 : -1);
  return a - b;
}

function isSame(a, b) {
  const names = Object.keys(a);
  return names.length === Object.keys(b).length && names.every((name) => a[name] === b[name] || (typeof a[name] === "object" && JSON.stringify(a[name]) === JSON.stringify(b[name])));
}

/**
 * A table of `rows`, which differ in `rowKey`. Only rows that changed are drawn again. `onOpen(row)` runs for a click, and for
 * Enter on the row that the arrow keys chose. `filter(row)` chooses what is shown. `sort` is `[{column, dir}]`.
 */
export function Table({ columns, rows, rowKey = "id", sort = [], filter = null, onOpen = null, label, empty = "Nothing here", maxHeight = "60vh", chosen = null }) {
  const place = useRef(null);
  const held = useRef({ table: null, shown: new Map(), isReady: false, sortedMs: 0, cursor: null });
  held.current.onOpen = onOpen;
  held.current.rows = rows;
  held.current.filter = filter;
  held.current.chosen = chosen;
  useLayoutEffect(() => {
    let isOver = false;
    const state = held.current;
    loadTabulator().then(({ TabulatorFull }) => {
      if (isOver || !place.current) return;
      const placeholder = element("span", "empty", empty);
      const table = new TabulatorFull(place.current, {
        data: (state.rows ?? []).map((row) => ({ ...row })),
        index: rowKey,
        columns: columns.map((column) => ({ formatter: cells.text(), headerTooltip: false, ...column })),
        layout: "fitColumns",
        responsiveLayout: "hide",
        maxHeight,
        initialSort: sort,
        nestedFieldSeparator: false,
        columnDefaults: { resizable: false, minWidth: 56 },
        placeholder,
        rowFormatter: (row) => {
          const node = row.getElement();
          const key = row.getData()[rowKey];
          node.setAttribute("aria-selected", String(key === state.cursor));
          node.classList.toggle("chosen", key === state.chosen);
        },
      });
      state.table = table;
      table.on("tableBuilt", () => {
        state.isReady = true;
        state.shown = new Map((state.rows ?? []).map((row) => [row[rowKey], row]));
        place.current?.setAttribute("aria-label", label);
        if (state.filter) table.setFilter((row) => state.filter?.(row) ?? true);
      });
      table.on("rowClick", (event, row) => {
        if (event.target.closest("a, button")) return;
        state.cursor = row.getData()[rowKey];
        state.onOpen?.(row.getData());
      });
    });
    return () => {
      isOver = true;
      state.isReady = false;
      dropDrawing(state);
      state.table?.destroy();
      state.table = null;
    };
  }, []);
  useEffect(() => {
    const state = held.current;
    if (state.isReady && rows) drawLater(state, () => state.isReady && update(state, rows, rowKey));
  }, [rows]);
  useEffect(() => {
    const state = held.current;
    if (!state.isReady) return;
    if (filter) state.table.setFilter((row) => state.filter?.(row) ?? true);
    else state.table.clearFilter();
  }, [filter]);
  useEffect(() => {
    for (const row of held.current.table?.getRows?.("visible") ?? []) row.getElement().classList.toggle("chosen", row.getData()[rowKey] === chosen);
  }, [chosen]);
  const onKeyDown = (event) => held.current.isReady && moveCursor(event, held.current, rowKey);
  return html`<div class="table" tabindex=${onOpen ? 0 : null} onKeyDown=${onOpen ? onKeyDown : null} ref=${place}></div>`;
}

function update(state, rows, rowKey) {
  const { table, shown } = state;
  const next = new Map(rows.map((row) => [row[rowKey], row]));
  const added = rows.filter((row) => !shown.has(row[rowKey]));
  const removed = [...shown.keys()].filter((key) => !next.has(key));
  const changed = rows.filter((row) => shown.has(row[rowKey]) && !isSame(shown.get(row[rowKey]), row));
  state.shown = next;
  if (!added.length && !removed.length && !changed.length) return;
  const top = table.rowManager.scrollTop;
  for (const row of changed) table.getRow(row[rowKey])?.update({ ...row });
  if (removed.length) table.deleteRow(removed);
  if (added.length) table.addData(added.map((row) => ({ ...row })));
  const sorters = table.getSorters();
  const now = Date.now();
  if (sorters.length && (added.length || now - state.sortedMs > SORT_EVERY_MS) && !state.table.element.matches(":hover")) {
    state.sortedMs = now;
    table.setSort(sorters.map(({ field, dir }) => ({ column: field, dir })));
    if (top) table.rowManager.element.scrollTop = top;
  }
}

function moveCursor(event, state, rowKey) {
  const rows = state.table.getRows("active");
  if (!rows.length || event.ctrlKey || event.metaKey || event.altKey) return;
  const at = rows.findIndex((row) => row.getData()[rowKey] === state.cursor);
  const page = 10;
  const targets = { ArrowDown: at + 1, ArrowUp: at < 0 ? rows.length - 1 : at - 1, Home: 0, End: rows.length - 1, PageDown: at + page, PageUp: at - page };
  if (event.key === "Enter" && at >= 0 && event.target === event.currentTarget) {
    event.preventDefault();
    state.onOpen?.(rows[at].getData());
    return;
  }
  if (!(event.key in targets)) return;
  event.preventDefault();
  const target = rows[Math.max(0, Math.min(rows.length - 1, targets[event.key]))];
  state.cursor = target.getData()[rowKey];
  for (const row of state.table.getRows("visible")) row.getElement().setAttribute("aria-selected", String(row.getData()[rowKey] === state.cursor));
  state.table.scrollToRow(target, "nearest", false).catch(() => {});
  requestAnimationFrame(() => target.getElement()?.setAttribute("aria-selected", "true"));
}
