// The outputs of a response: classes as bars, rows as a table, maps as pictures, numbers and texts as they are.

import { count, number } from "../core/format.js";
import { html, useEffect, useRef } from "../core/html.js";
import { elements, flat } from "../tensors/datatypes.js";

const MAX_VALUES = 64;
const MAX_ROWS = 200;
const MIN_SIDE = 16;

/** All outputs of a response. */
export function Outputs({ outputs, labels }) {
  const rows = outputs[0]?.shape[0];
  const isTable = outputs.length > 1 && rows > 1 && rows <= MAX_ROWS && outputs.every((output) => output.shape[0] === rows && elements(output.shape) / rows <= 16);
  if (isTable) return html`<${Rows} outputs=${outputs} rows=${rows} />`;
  return outputs.map((output) => html`<${Output} key=${output.name} output=${output} labels=${labels?.[output.name]} />`);
}

function Output({ output, labels }) {
  const values = flat(output.data ?? []);
  const classes = output.datatype === "BYTES" && labels ? values.map(readClass) : null;
  const map = mapOf(output);
  return html`<section class="output" aria-label="Output ${output.name}">
    <h3>${output.name} <small>${output.datatype} [${output.shape.join(", ")}]</small></h3>
    ${classes?.every(Boolean)
      ? html`<${Classes} classes=${classes} />`
      : map
        ? html`<${MapPicture} map=${map} values=${values} />`
        : html`<${Values} values=${values} isText=${output.datatype === "BYTES"} />`}
  </section>`;
}

/** A class as Triton writes it: "score:index:label". */
function readClass(text) {
  const found = /^([^:]+):(\d+)(?::(.*))?$/s.exec(text);
  return found && Number.isFinite(Number(found[1])) ? { score: Number(found[1]), index: Number(found[2]), label: found[3] ?? `class ${found[2]}` } : null;
}

/** Probabilities with three decimals, other scores as they are. */
function scoreText(score) {
  return Math.abs(score) <= 1 ? score.toFixed(3) : number(score);
}

function Classes({ classes }) {
  const highest = Math.max(1e-9, ...classes.map((one) => Math.abs(one.score)));
  const scale = highest <= 1 ? 1 : highest;
  return html`<ol class="classes">
    ${classes.map(
      (one) => html`<li key=${one.index} style="--share: ${(Math.max(0, one.score) / scale) * 100}%"><span>${one.label}</span><b>${scoreText(one.score)}</b></li>`,
    )}
  </ol>`;
}

function Values({ values, isText }) {
  if (isText) {
    return html`<ul class="texts">${values.slice(0, MAX_ROWS).map((value, place) => html`<li key=${place}>${String(value)}</li>`)}</ul>
      ${values.length > MAX_ROWS ? html`<p class="note">and ${values.length - MAX_ROWS} more</p>` : null}`;
  }
  if (values.length === 1) return html`<p class="scalar">${typeof values[0] === "number" ? String(Number(values[0].toPrecision(6))) : String(values[0])}</p>`;
  const numbers = values.map(Number).filter((value) => !Number.isNaN(value));
  const mean = numbers.reduce((total, value) => total + value, 0) / Math.max(1, numbers.length);
  return html`<p class="note">${count(values.length, "value")}, ${number(least(numbers))} to ${number(most(numbers))}, mean ${number(mean)}</p>
    <p class="values">${values.slice(0, MAX_VALUES).map(String).join("  ")}${values.length > MAX_VALUES ? " …" : ""}</p>`;
}

function least(numbers) {
  return numbers.reduce((a, b) => Math.min(a, b), Infinity);
}

function most(numbers) {
  return numbers.reduce((a, b) => Math.max(a, b), -Infinity);
}

function Rows({ outputs, rows }) {
  const columns = outputs.map((output) => {
    const values = flat(output.data ?? []);
    const width = elements(output.shape) / rows;
    return { name: output.name, cell: (row) => values.slice(row * width, (row + 1) * width).map((value) => (typeof value === "number" ? number(value) : String(value))).join("  ") };
  });
  return html`<div class="scroll"><table class="plain-table">
    <thead><tr>${outputs.map((output) => html`<th key=${output.name}>${output.name} <small>${output.datatype} [${output.shape.join(", ")}]</small></th>`)}</tr></thead>
    <tbody>${Array.from({ length: rows }, (_, row) => html`<tr key=${row}>${columns.map((column) => html`<td key=${column.name}>${column.cell(row)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

/** How an output can be drawn: one channel or three, both sides long; null if it can't. */
function mapOf({ datatype, shape }) {
  if (datatype === "BYTES") return null;
  const inner = shape.filter((dim, place) => dim !== 1 || place >= shape.length - 1);
  if (inner.length === 2 && inner[0] >= MIN_SIDE && inner[1] >= MIN_SIDE) return { height: inner[0], width: inner[1], channels: 1, isFirst: true };
  if (inner.length === 3 && inner[0] === 3 && inner[1] >= MIN_SIDE && inner[2] >= MIN_SIDE) return { height: inner[1], width: inner[2], channels: 3, isFirst: true };
  if (inner.length === 3 && inner[2] === 3 && inner[0] >= MIN_SIDE && inner[1] >= MIN_SIDE) return { height: inner[0], width: inner[1], channels: 3, isFirst: false };
  return null;
}

function MapPicture({ map, values }) {
  const canvas = useRef(null);
  useEffect(() => {
    const { width, height, channels, isFirst } = map;
    const context = canvas.current.getContext("2d");
    const picture = context.createImageData(width, height);
    const low = least(values);
    const factor = 255 / (most(values) - low || 1);
    const area = width * height;
    for (let place = 0; place < area; place += 1) {
      for (let channel = 0; channel < 3; channel += 1) {
        const from = channels === 1 ? place : isFirst ? channel * area + place : place * 3 + channel;
        picture.data[place * 4 + channel] = (values[from] - low) * factor;
      }
      picture.data[place * 4 + 3] = 255;
    }
    context.putImageData(picture, 0, 0);
  }, [values]);
  return html`<canvas ref=${canvas} class="map" width=${map.width} height=${map.height} role="img" aria-label="The output as a picture, from its least value (black) to its greatest (white)"></canvas>`;
}
