// `Table`: a Tabulator table. Cells are made with `cells.*`, which set texts as text; nothing is parsed as HTML.

import { firstLine } from "../core/format.js";
import { html, useEffect, useLayoutEffect, useRef } from "../core/html.js";
import { drawLater, dropDrawing } from "../core/tasks.js";

let loading = null;

function loadTabulator() {
  loading ??= import("/web/vendor/tabulator_esm.min.mjs");
  return loading;
}

const SORT_EVERY_MS = 3000;
const ROWS_AT_ONCE = 20;
const LETTER_PX = 8;
const LONG_TEXT = 14;
const MAX_NAME_SHARE = 0.4;

function element(kind, className, text) {
  const node = document.createElement(kind);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

/** `node`, whose text the pointer shows in full where the column is too narrow for it. */
function readable(node) {
  if (node.textContent.length > LONG_TEXT) node.title = node.textContent;
  return node;
}

/** Formatters of Tabulator. */
export const cells = {
  /** The value as text, made by `format(value, row)`. */
  text: (format = (value) => value ?? "–", className = "") => (cell) => readable(element("span", className, format(cell.getValue(), cell.getData()))),
  /** The first line of a reason; the pointer shows all of it. */
  reason: () => (cell) => {
    const text = cell.getValue() ?? "";
    const node = element("span", "", firstLine(text));
    node.title = text;
    return node;
  },
  /** A link to `target(row)`. */
  link: (target, format = (value) => value) => (cell) => {
    const node = readable(element("a", "cell-link", format(cell.getValue(), cell.getData())));
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
  return { title, field, minWidth: 84, hozAlign: "right", headerHozAlign: "right", sorter: unknownLast, formatter: cells.text(format, "number"), headerSortStartingDir: "desc", ...more };
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
  const held = useRef({ table: null, shown: new Map(), pending: new Map(), isReady: false, sortedMs: 0, cursor: null });
  held.current.onOpen = onOpen;
  held.current.rows = rows;
  held.current.filter = filter;
  held.current.chosen = chosen;
  useLayoutEffect(() => {
    let isOver = false;
    const state = held.current;
    loadTabulator().then(({ TabulatorFull }) => {
      if (isOver || !place.current) return;
      // A row with one cell, as a grid may have no other parts.
      const placeholder = element("div");
      placeholder.setAttribute("role", "row");
      placeholder.appendChild(element("div", "empty", empty)).setAttribute("role", "gridcell");
      const drawn = state.rows ?? [];
      const table = new TabulatorFull(place.current, {
        data: drawn.map((row) => ({ ...row })),
        index: rowKey,
        columns: columns.map((column) => sized(column, drawn, place.current.clientWidth)),
        layout: "fitColumns",
        responsiveLayout: "hide",
        maxHeight,
        initialSort: sort,
        nestedFieldSeparator: false,
        columnDefaults: { resizable: false },
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
        state.shown = new Map(drawn.map((row) => [row[rowKey], row]));
        // Tabulator builds in a task of its own: other rows may have come since it was made.
        if (state.rows && state.rows !== drawn) drawLater(state, () => state.isReady && update(state, state.rows, rowKey));
        place.current?.setAttribute("aria-label", label);
        nameParts(table.element);
        if (state.filter) table.setFilter((row) => state.filter?.(row) ?? true);
      });
      table.on("scrollVertical", () => drawLater(state.pending, () => state.isReady && drawVisible(state, rowKey)));
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
      dropDrawing(state.pending);
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
    const { isReady, table } = held.current;
    for (const row of isReady ? table.getRows("visible") : []) row.getElement().classList.toggle("chosen", row.getData()[rowKey] === chosen);
  }, [chosen]);
  const onKeyDown = (event) => held.current.isReady && moveCursor(event, held.current, rowKey);
  return html`<div class="table" tabindex=${onOpen ? 0 : null} onKeyDown=${onOpen ? onKeyDown : null} ref=${place}></div>`;
}

/**
 * A column with its least width. Numbers take no more: names and reasons get the room that is left. A column of names with
 * `longest` (pixels) is as wide as the longest name in `rows` at least, up to `longest` pixels and its share of the table's `width`; other
 * columns are hidden for that.
 */
function sized({ longest = 0, ...column }, rows, width) {
  const letters = longest ? rows.reduce((most, row) => Math.max(most, String(row[column.field] ?? "").length), 0) : 0;
  const minWidth = Math.max(column.minWidth ?? 0, Math.ceil(column.title.length * LETTER_PX) + 48, Math.min(longest, width * MAX_NAME_SHARE, letters * LETTER_PX + 16));
  return { formatter: cells.text(), headerTooltip: false, ...column, minWidth, ...(column.hozAlign === "right" ? { width: minWidth } : {}) };
}

/** The part of a grid that scrolls holds its rows, as a group of them; Tabulator gives it the focus, and no role. */
function nameParts(grid) {
  grid.querySelector(".tabulator-tableholder")?.setAttribute("role", "rowgroup");
  grid.querySelector(".tabulator-table")?.setAttribute("role", "presentation");
}

/** Brings the table up to date: what is visible now, the other rows before the next sorting, each step in a task of its own. */
function update(state, rows, rowKey) {
  const { table, shown, pending } = state;
  const next = new Map(rows.map((row) => [row[rowKey], row]));
  const added = rows.filter((row) => !shown.has(row[rowKey]));
  const removed = [...shown.keys()].filter((key) => !next.has(key));
  for (const row of rows) if (shown.has(row[rowKey]) && !isSame(shown.get(row[rowKey]), row)) pending.set(row[rowKey], row);
  state.shown = next;
  if (removed.length) {
    for (const key of removed) pending.delete(key);
    table.deleteRow(removed);
  }
  if (added.length) table.addData(added.map((row) => ({ ...row })));
  drawVisible(state, rowKey);
  const now = Date.now();
  if (added.length || now - state.sortedMs > SORT_EVERY_MS) {
    state.sortedMs = now;
    drawLater(pending, () => state.isReady && drawPending(state));
  }
}

function drawVisible(state, rowKey) {
  for (const row of state.table.getRows("visible")) {
    const key = row.getData()[rowKey];
    const values = state.pending.get(key);
    if (!values) continue;
    state.pending.delete(key);
    row.update({ ...values });
  }
}

function drawPending(state) {
  const { table, pending } = state;
  for (const [key, values] of [...pending].slice(0, ROWS_AT_ONCE)) {
    pending.delete(key);
    table.getRow(key)?.update({ ...values });
  }
  if (pending.size) {
    drawLater(pending, () => state.isReady && drawPending(state));
    return;
  }
  const sorters = table.getSorters();
  // Rows stay in place under the pointer.
  if (!sorters.length || table.element.matches(":hover") || isInOrder(table, sorters)) return;
  const top = table.rowManager.element.scrollTop;
  table.setSort(sorters.map(({ field, dir }) => ({ column: field, dir })));
  if (top) table.rowManager.element.scrollTop = top;
}

/** Whether the rows are still sorted: sorting draws all of them again. */
function isInOrder(table, [{ field, dir }]) {
  const values = table.getData("active").map((row) => row[field]);
  const isOrdered = dir === "asc" ? (a, b) => a <= b : (a, b) => a >= b;
  return values.every((value, place) => place === 0 || isOrdered(values[place - 1], value));
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
  // A row that was not visible is drawn now.
  requestAnimationFrame(() => state.cursor === target.getData()[rowKey] && target.getElement()?.setAttribute("aria-selected", "true"));
}
