// A request made from the model's metadata, as JSON or as JSON followed by raw tensors.

import { elements, encoded, flat, needsBytes } from "./datatypes.js";

/** Tensors with more elements than this are sent as bytes. */
export const MAX_JSON_ELEMENTS = 4096;

export const LABELS_SHOWN = 5;

/** The dims to send for a tensor of the metadata, with 1 for the batch dimension and for what is variable. */
export function startShape(tensor, maxBatchSize) {
  return tensor.shape.map((dim, place) => (dim === -1 || (place === 0 && maxBatchSize > 0) ? 1 : dim));
}

/** Whether the first dimension is that of the batch. */
export function hasBatch(config) {
  return (config?.max_batch_size ?? 0) > 0;
}

/** The tensor of an input whose text is JSON: `{name, datatype, shape, data}`. Raises Error for a text that does not fit. */
export function fromText(input, text, shapeText) {
  let data;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new Error(`${input.name}: not valid JSON: ${error.message}`);
  }
  const shape = readShape(input.name, shapeText);
  const values = flat(data);
  if (values.length !== elements(shape)) throw new Error(`${input.name}: ${values.length} values do not fit shape [${shape.join(", ")}], which has ${elements(shape)}`);
  return { name: input.name, datatype: input.datatype, shape, data: values };
}

/** A shape from text as "1, 3, 224". */
export function readShape(name, text) {
  const shape = text
    .split(/[\s,x×]+/)
    .filter(Boolean)
    .map(Number);
  if (shape.some((dim) => !Number.isInteger(dim) || dim < 0)) throw new Error(`${name}: a shape is whole numbers, as 1, 3, 224; got ${text}`);
  return shape;
}

/** The members of a request beside its inputs. */
function around(options) {
  const parameters = { ...options.parameters };
  return {
    ...(options.id ? { id: options.id } : {}),
    ...(Object.keys(parameters).length ? { parameters } : {}),
    ...(options.outputs?.length ? { outputs: options.outputs } : {}),
  };
}

/** Whether the request has tensors that JSON can't have, or that are long. */
export function isBinary(tensors) {
  return tensors.some((tensor) => tensor.raw || needsBytes(tensor.datatype) || tensor.data.length > MAX_JSON_ELEMENTS);
}

/** The request as a JSON document; raw content is left out. */
export function asDocument(tensors, options) {
  return {
    ...around(options),
    inputs: tensors.map(({ name, datatype, shape, data }) => ({ name, datatype, shape, data: Array.from(data ?? [], jsonValue) })),
  };
}

function jsonValue(value) {
  return typeof value === "bigint" ? Number(value) : value;
}

/** `{body, headers}` to send. */
export function asBody(tensors, options) {
  if (!isBinary(tensors)) return { body: JSON.stringify(asDocument(tensors, options)), headers: { "Content-Type": "application/json" } };
  const contents = tensors.map((tensor) => tensor.raw ?? encoded(tensor.datatype, tensor.data));
  const head = new TextEncoder().encode(
    JSON.stringify({
      ...around(options),
      inputs: tensors.map(({ name, datatype, shape }, place) => ({ name, datatype, shape, parameters: { binary_data_size: contents[place].length } })),
    }),
  );
  return {
    body: new Blob([head, ...contents]),
    headers: { "Content-Type": "application/octet-stream", "Inference-Header-Content-Length": String(head.length) },
  };
}

/** The outputs to ask for: classes where the output has labels and `wantsLabels`; none, if the default would do. */
export function wantedOutputs(metadata, labels, wantsLabels) {
  const outputs = metadata.outputs ?? [];
  if (!wantsLabels || !outputs.some((output) => labels?.[output.name])) return [];
  return outputs.map((output) =>
    labels[output.name] ? { name: output.name, parameters: { classification: Math.min(LABELS_SHOWN, countOf(labels[output.name]) || LABELS_SHOWN) } } : { name: output.name },
  );
}

function countOf(labels) {
  return typeof labels === "number" ? labels : (labels.length ?? Object.keys(labels).length);
}
