// The same request as commands and programs to copy.

import { NUMPY } from "./datatypes.js";
import { asDocument, isBinary } from "./request.js";

const MAX_SHOWN = 64;

/**
 * `{curl, python, nats}` for a request. `place` is the gateway's `host:port`. Requests with long tensors are read from
 * `request.json`, those with a file's bytes from that file. `version` "" is the default one.
 */
export function snippets({ model, version, tensors, options, place }) {
  const path = `/v2/models/${encodeURIComponent(model)}${version ? `/versions/${version}` : ""}/infer`;
  const document = asDocument(tensors, options);
  const files = tensors.filter((tensor) => tensor.raw && tensor.file);
  const isLong = !files.length && tensors.some((tensor) => (tensor.data?.length ?? 0) > MAX_SHOWN);
  const json = JSON.stringify(document);
  return {
    needsFile: isLong ? "request.json" : "",
    document: json,
    curl: files.length ? curlWithFile(tensors, options, `http://${place}${path}`) : `curl -s http://${place}${path} ${isLong ? "-d @request.json" : `-d ${quoted(json)}`}`,
    python: python(model, version, tensors, options, place),
    nats: nats(model, version, tensors, json, isLong, place),
  };
}

function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

function curlWithFile(tensors, options, url) {
  const head = asDocument([], options);
  const inputs = tensors.map(({ name, datatype, shape, raw, data }) =>
    raw ? { name, datatype, shape, parameters: { binary_data_size: raw.length } } : { name, datatype, shape, data: Array.from(data, (value) => (typeof value === "bigint" ? Number(value) : value)) },
  );
  const contents = tensors.filter((tensor) => tensor.raw).map(({ raw, file }) => `printf ${quoted(lengthBytes(raw.length - 4))}; cat ${quoted(file)}`);
  return [
    `head=${quoted(JSON.stringify({ ...head, inputs }))}`,
    `{ printf %s "$head"; ${contents.join("; ")}; } | \\`,
    `  curl -s ${url} \\`,
    `  -H "Inference-Header-Content-Length: \${#head}" --data-binary @-`,
  ].join("\n");
}

/** The four bytes before an element of BYTES, for printf. */
function lengthBytes(length) {
  return [0, 8, 16, 24].map((shift) => `\\${((length >>> shift) & 255).toString(8).padStart(3, "0")}`).join("");
}

function pythonValue(value) {
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return JSON.stringify(value);
  if (typeof value === "bigint") return String(value);
  return Number.isInteger(value) ? String(value) : String(Math.fround(value) === value ? Number(value.toPrecision(7)) : value);
}

function python(model, version, tensors, options, place) {
  const lines = ["import numpy as np", "import tritonclient.http as triton", ""];
  if (tensors.some((tensor) => !tensor.raw && tensor.data.length > MAX_SHOWN)) lines.splice(0, 0, "import json", "");
  lines.push(`client = triton.InferenceServerClient(${JSON.stringify(place)})`, "inputs = []");
  tensors.forEach((tensor, at) => {
    const { name, datatype, shape, raw, file, data } = tensor;
    const kind = NUMPY[datatype];
    if (raw && file) lines.push(`values = np.array([open(${JSON.stringify(file)}, "rb").read()], np.object_)`);
    else if (data.length > MAX_SHOWN) lines.push(`values = np.array(json.load(open("request.json"))["inputs"][${at}]["data"], ${kind ?? "np.float32"})`);
    else lines.push(`values = np.array([${Array.from(data, pythonValue).join(", ")}], ${kind ?? "np.float32"})`);
    lines.push(`tensor = triton.InferInput(${JSON.stringify(name)}, [${shape.join(", ")}], ${JSON.stringify(datatype)})`);
    lines.push(`tensor.set_data_from_numpy(values.reshape(${shape.join(", ") || "()"}))`, "inputs.append(tensor)");
  });
  const outputs = (options.outputs ?? []).map((output) => {
    const classes = output.parameters?.classification;
    return `triton.InferRequestedOutput(${JSON.stringify(output.name)}${classes ? `, class_count=${classes}` : ""})`;
  });
  const more = [];
  if (version) more.push(`model_version=${JSON.stringify(String(version))}`);
  if (outputs.length) more.push(`outputs=[${outputs.join(", ")}]`);
  for (const [name, value] of Object.entries(options.parameters ?? {})) more.push(`${name}=${pythonValue(value)}`);
  lines.push(`result = client.infer(${[JSON.stringify(model), "inputs", ...more].join(", ")})`);
  lines.push('for output in result.get_response()["outputs"]:', '    print(output["name"], result.as_numpy(output["name"]))');
  return lines.join("\n");
}

function nats(model, version, tensors, json, isLong, place) {
  const subject = `infer.${token(model)}${version ? `.v${version}` : ""}`;
  const port = place.slice(place.lastIndexOf(":") + 1); // the data folder of a server has the name of its HTTP port
  const access = `export NATS_URL=$(cat ~/.local/share/weir/${port}/nats-url)   # row NATS access of the start-up block`;
  if (isBinary(tensors) && tensors.some((tensor) => tensor.raw)) return `# A file's bytes do not fit an argument of the shell; a program can send them: see docs/nats.md.\n# Subject: ${subject}, header Inference-Header-Content-Length: the length of the JSON before the bytes.`;
  return `${access}\nnats request ${quoted(subject)} ${isLong ? '"$(cat request.json)"' : quoted(json)}`;
}

/** A model's name as one token of a subject. */
function token(name) {
  const isPlain = (byte) => /[A-Za-z0-9_-]/.test(String.fromCharCode(byte));
  return Array.from(new TextEncoder().encode(name), (byte) => (isPlain(byte) ? String.fromCharCode(byte) : `=${byte.toString(16).toUpperCase().padStart(2, "0")}`)).join("");
}
