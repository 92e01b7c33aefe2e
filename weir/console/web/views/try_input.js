// One input of the form: values as JSON, or a file.

import { bytes, count, grouped } from "../core/format.js";
import { html, useRef, useState } from "../core/html.js";
import { Choices, Field } from "../components/controls.js";
import { elements, encoded, flat } from "../tensors/datatypes.js";
import { drawnPicture, examplePicture, monoSamples, pictureLayout, pixels, SCALES, soundLength } from "../tensors/media.js";
import { fromText, hasBatch, readShape, startShape } from "../tensors/request.js";

const SOUND_RATE = 16_000;
const MAX_SHOWN = 4096;
const MAX_RANDOM = 1 << 22;

/** The state of an input of the form, filled with the model's sample. Pictures are asked for first, where one fits. */
export function startInput(input, model) {
  const isOptional = model.inputs ? !model.inputs.some((one) => one.name === input.name) : false;
  const sample = model.sample?.inputs?.find((one) => one.name === input.name);
  const maxBatchSize = model.config?.max_batch_size ?? 0;
  const shape = sample?.shape ?? startShape(input, maxBatchSize);
  const values = sample ? flat(sample.data) : [];
  const dims = hasBatch(model.config) ? input.shape.slice(1) : input.shape;
  const kind = kindOf(input);
  const isText = input.datatype === "BYTES";
  return {
    name: input.name,
    datatype: input.datatype,
    declared: input.shape,
    dims,
    isBatched: hasBatch(model.config),
    kind,
    fits: { picture: !isText && pictureLayout(dims), sound: !isText && input.datatype.startsWith("FP") ? soundLength(dims, kind) : null, bytes: isText },
    isOptional,
    mode: isOptional ? "none" : sample && values.length <= MAX_SHOWN ? "values" : isText ? "values" : "random",
    text: textOf(values, isText),
    isPlain: isText && values.length === 1 && typeof values[0] === "string",
    shapeText: shape.join(", "),
    scale: "0–1",
    file: null,
    content: null,
    note: "",
  };
}

/** What an input most likely is, by its name: image, audio, or tensor. */
export function kindOf({ name }) {
  if (/image|picture|photo|img|jpe?g|png|pixel/i.test(name)) return "image";
  if (/audio|sound|wav|speech|voice/i.test(name)) return "audio";
  return "tensor";
}

function textOf(values, isText) {
  if (isText && values.length === 1 && typeof values[0] === "string") return values[0];
  return values.length <= MAX_SHOWN ? JSON.stringify(values) : "";
}

/** The tensors of the form. Raises Error for an input that does not fit. */
export function tensorsOf(inputs) {
  const sent = inputs.filter((input) => input.mode !== "none");
  return sent.map((input) => {
    if (input.mode === "random") return randomTensor(input);
    if (input.mode === "file") {
      if (!input.content) throw new Error(`${input.name}: choose a file, or give values`);
      return { name: input.name, datatype: input.datatype, ...input.content };
    }
    return fromText(input, input.isPlain ? JSON.stringify([input.text]) : input.text, input.shapeText);
  });
}

/** One input. `onChange(changes)` is called with what is different. */
export function InputCard({ input, onChange }) {
  const picker = useRef(null);
  const [isOver, setOver] = useState(false);
  const { fits } = input;
  const takesFile = fits.bytes || fits.picture || fits.sound !== null;
  const isVariable = input.declared.some((dim) => dim === -1);

  async function take(file) {
    if (!file) return;
    try {
      onChange(await contentOf(input, file));
    } catch (error) {
      onChange({ mode: "file", file: null, content: null, chunks: null, preview: null, note: `${file.name} can't be used: ${error.message || error}` });
    }
  }

  async function changeScale(scale) {
    onChange({ scale });
    if (input.file) onChange({ scale, ...(await contentOf({ ...input, scale }, input.file)) });
  }
  const drop = {
    onDragOver: (event) => (event.preventDefault(), setOver(true)),
    onDragLeave: () => setOver(false),
    onDrop: (event) => {
      event.preventDefault();
      setOver(false);
      take(event.dataTransfer.files[0]);
    },
  };
  return html`<fieldset class="card input ${isOver ? "over" : ""}" ...${takesFile ? drop : {}}>
    <legend><b>${input.name}</b> <small>${input.datatype} [${input.declared.join(", ")}]</small></legend>
    ${choicesOf(input, takesFile).length > 1 ? html`<${Choices} label="Content of ${input.name}" choices=${choicesOf(input, takesFile)} current=${input.mode} onChoose=${(mode) => onChange({ mode, chunks: null, content: null, file: null, preview: null, note: "" })} />` : null}
    ${input.mode === "values"
      ? html`
          <textarea aria-label="Content of ${input.name}" spellcheck="false" rows=${input.text.length > 200 ? 6 : 3} value=${input.text} onInput=${(event) => onChange({ text: event.target.value })}></textarea>
          <div class="row">
            ${isVariable ? html`<${Field} label="Shape">${(id) => html`<input id=${id} class="short" value=${input.shapeText} onInput=${(event) => onChange({ shapeText: event.target.value })} />`}</${Field}>` : null}
            ${fits.bytes ? html`<label class="check"><input type="checkbox" checked=${!input.isPlain} onChange=${(event) => onChange({ isPlain: !event.target.checked, text: event.target.checked ? JSON.stringify([input.text]) : String(firstOf(input.text)) })} /> several elements, as JSON</label>` : null}
          </div>
        `
      : null}
    ${input.mode === "random" ? html`<div class="row"><${Field} label="Shape" note="Random numbers fill it">${(id) => html`<input id=${id} class="short" value=${input.shapeText} onInput=${(event) => onChange({ shapeText: event.target.value })} />`}</${Field}></div>` : null}
    ${input.mode === "none" ? html`<p class="note">The input is optional, and the request leaves it out.</p>` : null}
    ${input.mode === "file"
      ? html`
          <div class="drop">
            ${input.preview ? html`<img src=${input.preview} alt="The picture as it is sent" />` : null}
            <p>${input.file ? html`<b>${input.file.name}</b> ${bytes(input.file.size)}` : "Drop a file here"}</p>
            ${input.note ? html`<p class=${input.content ? "note" : "failure"}>${input.note}</p>` : null}
            <p class="buttons">
              <button type="button" onClick=${() => picker.current.click()}>Choose a file</button>
              ${fits.picture || (fits.bytes && input.kind === "image") ? html`<button type="button" onClick=${async () => take(await examplePicture())}>Use an example picture</button>` : null}
            </p>
            <input ref=${picker} type="file" hidden aria-label="File for ${input.name}" onChange=${(event) => take(event.target.files[0])} />
          </div>
          ${fits.picture && input.datatype !== "UINT8" ? html`<${Choices} label="Values of pixels" choices=${Object.keys(SCALES).map((scale) => [scale, scale])} current=${input.scale} onChoose=${changeScale} />` : null}
        `
      : null}
  </fieldset>`;
}

function fileTitle({ fits, kind }) {
  if (fits.picture) return "Picture";
  if (fits.sound !== null) return "Sound";
  return { image: "Picture", audio: "Sound" }[kind] ?? "File";
}

function firstOf(text) {
  try {
    return flat(JSON.parse(text))[0] ?? "";
  } catch {
    return text;
  }
}

/** The ways in which an input can get its content. */
function choicesOf({ fits, isOptional, kind, datatype }, takesFile) {
  return [
    ...(isOptional ? [["none", "Left out"]] : []),
    ["values", fits.bytes ? "Text" : "Values"],
    ...(fits.bytes || datatype === "BOOL" ? [] : [["random", "Random"]]),
    ...(takesFile ? [["file", fileTitle({ fits, kind })]] : []),
  ];
}

/** Fractions for floats, bytes for UINT8, and 0 or 1 for other integers, which are often indices. */
function randomTensor({ name, datatype, shapeText }) {
  const shape = readShape(name, shapeText);
  const size = elements(shape);
  if (size > MAX_RANDOM) throw new Error(`${name}: shape [${shape.join(", ")}] has ${grouped(size)} elements, and the page makes at most ${grouped(MAX_RANDOM)}`);
  const isFraction = datatype.startsWith("FP") || datatype === "BF16";
  const highest = datatype === "UINT8" ? 256 : 2;
  let state = 1;
  const data = Array.from({ length: size }, () => {
    state = (state * 48271) % 0x7fffffff;
    return isFraction ? Number((state / 0x7fffffff).toFixed(3)) : state % highest;
  });
  return { name, datatype, shape, data };
}

/** What changes in an input when a file was chosen. */
async function contentOf(input, file) {
  const batched = (shape) => (input.isBatched || input.dims.length > shape.length ? [1, ...shape] : shape);
  const isImage = file.type.startsWith("image/");
  if (input.fits.bytes) {
    const content = new Uint8Array(await file.arrayBuffer());
    const shape = input.declared.map((dim) => (dim === -1 ? 1 : dim));
    if (isImage) URL.revokeObjectURL(input.preview);
    return {
      mode: "file",
      file,
      preview: isImage ? await previewOf(file) : null,
      content: { shape, raw: encoded("BYTES", [content]), file: file.name, data: [] },
      note: `The file's ${grouped(content.length)} bytes are one element.`,
    };
  }
  if (input.fits.picture) {
    const { layout, channels, height, width } = input.fits.picture;
    const canvas = await drawnPicture(file, height, width);
    const { shape, data } = pixels(canvas, { layout, channels }, input.datatype, input.scale);
    const cast = input.datatype === "UINT8" || input.datatype.startsWith("FP") ? data : Array.from(data, Math.round);
    const sent = batched(shape);
    return {
      mode: "file",
      file,
      preview: canvas.toDataURL("image/png"),
      content: { shape: sent, data: cast },
      note: `${canvas.width} × ${canvas.height} pixels, ${layout} [${sent.join(", ")}], ${count(channels, "channel")}.`,
    };
  }
  const samples = await monoSamples(file, SOUND_RATE);
  const length = input.fits.sound;
  const put = (at, size) => {
    const chunk = new Float32Array(size);
    chunk.set(samples.subarray(at, at + size));
    return chunk;
  };
  const size = length === -1 ? samples.length : length;
  const chunks = length === -1 ? null : Array.from({ length: Math.ceil(samples.length / size) }, (_, at) => put(at * size, size));
  const shape = input.declared.map((dim, place) => (place === 0 && input.isBatched ? 1 : dim === length ? size : dim === -1 ? 1 : dim));
  return {
    mode: "file",
    file,
    samples,
    rate: SOUND_RATE,
    chunks,
    content: { shape, data: chunks ? chunks[0] : put(0, size) },
    note: `${(samples.length / SOUND_RATE).toFixed(1)} s, mono at ${SOUND_RATE / 1000} kHz${chunks ? `, in ${count(chunks.length, "chunk")} of ${size} samples` : ""}.`,
  };
}

async function previewOf(file) {
  const canvas = await drawnPicture(file, 0, 0);
  return canvas.toDataURL("image/png");
}
