// The same request as commands and programs to copy.

import { NUMPY } from "./datatypes.js";
import { asDocument, isBinary } from "./request.js";

const MAX_SHOWN = 64;

/** Parameters that clients of tritonclient pass by name. */
const NAMED = new Set(["sequence_id", "sequence_start", "sequence_end", "priority", "timeout"]);

/**
 * `{curl, python, nats}` for a request. `places` is where it can be sent (`placesOf` of the form). Requests with long tensors
 * are read from `request.json`, those with a file's bytes from that file. `version` "" is the default one. A decoupled model
 * sends any number of responses, which HTTP has as a stream of events (`generate_stream`) and gRPC as a stream; `declared` are
 * the inputs of its metadata.
 */
export function snippets({ model, version, tensors, options, places, declared = [], isDecoupled = false }) {
  const base = `http${places.http.isEncrypted ? "s" : ""}://${places.http.place}/v2/models/${encodeURIComponent(model)}${version ? `/versions/${version}` : ""}`;
  const document = asDocument(tensors, options);
  const files = tensors.filter((tensor) => tensor.raw && tensor.file);
  const isLong = !files.length && tensors.some((tensor) => (tensor.data?.length ?? 0) > MAX_SHOWN);
  const json = JSON.stringify(document);
  const plain = files.length ? curlWithFile(tensors, options, `${base}/infer`) : `curl -s ${base}/infer ${isLong ? "-d @request.json" : `-d ${quoted(json)}`}`;
  return {
    needsFile: isLong ? "request.json" : "",
    document: json,
    curl: isDecoupled ? curlOfStream(base, tensors, options, declared, isLong) : plain,
    python: isDecoupled ? pythonOfStream(model, version, tensors, options, places) : python(model, version, tensors, options, places),
    nats: nats(model, version, tensors, json, isLong, places, isDecoupled),
  };
}

/** `generate_stream` takes a flat JSON object: the values of each input in a list, which get the shape that the model declares. */
function curlOfStream(base, tensors, options, declared, isLong) {
  const isFlat = tensors.every((tensor) => !tensor.raw && isFlatShape(tensor, declared.find((input) => input.name === tensor.name)));
  if (!isFlat || "sequence_id" in options.parameters) return "# generate_stream takes flat JSON, without the shapes or the sequence of this request:\n# send it over gRPC, as the Python program does.";
  const url = `${base}/generate_stream`;
  if (isLong) {
    const flatten = 'import json; print(json.dumps({t["name"]: t["data"] for t in json.load(open("request.json"))["inputs"]}))';
    return `python3 -c ${quoted(flatten)} | curl -sN ${url} -d @-`;
  }
  const values = Object.fromEntries(tensors.map(({ name, data }) => [name, data.length === 1 ? jsonValue(data[0]) : Array.from(data, jsonValue)]));
  return `curl -sN ${url} -d ${quoted(JSON.stringify({ ...values, ...options.parameters }))}`;
}

function jsonValue(value) {
  return typeof value === "bigint" ? Number(value) : value;
}

/** Whether the shape follows from the number of values: the innermost variable dimension takes what is left, others are 1. */
function isFlatShape({ shape }, input) {
  if (!input) return false;
  const last = input.shape.lastIndexOf(-1);
  return input.shape.every((dim, place) => dim !== -1 || place === last || shape[place] === 1);
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

/** The lines that make `inputs`. */
function pythonInputs(tensors) {
  const lines = ["inputs = []"];
  tensors.forEach((tensor, at) => {
    const { name, datatype, shape, raw, file, data } = tensor;
    const kind = NUMPY[datatype];
    if (raw && file) lines.push(`values = np.array([open(${JSON.stringify(file)}, "rb").read()], np.object_)`);
    else if (data.length > MAX_SHOWN) lines.push(`values = np.array(json.load(open("request.json"))["inputs"][${at}]["data"], ${kind ?? "np.float32"})`);
    else lines.push(`values = np.array([${Array.from(data, pythonValue).join(", ")}], ${kind ?? "np.float32"})`);
    lines.push(`tensor = triton.InferInput(${JSON.stringify(name)}, [${shape.join(", ")}], ${JSON.stringify(datatype)})`);
    lines.push(`tensor.set_data_from_numpy(values.reshape(${shape.join(", ") || "()"}))`, "inputs.append(tensor)");
  });
  return lines;
}

/** What follows the inputs in the call of a client. */
function pythonOptions(version, options) {
  const more = [];
  if (version) more.push(`model_version=${JSON.stringify(String(version))}`);
  const outputs = (options.outputs ?? []).map((output) => {
    const classes = output.parameters?.classification;
    return `triton.InferRequestedOutput(${JSON.stringify(output.name)}${classes ? `, class_count=${classes}` : ""})`;
  });
  if (outputs.length) more.push(`outputs=[${outputs.join(", ")}]`);
  const own = [];
  for (const [name, value] of Object.entries(options.parameters ?? {})) {
    if (NAMED.has(name)) more.push(`${name}=${pythonValue(value)}`);
    else own.push(`${JSON.stringify(name)}: ${pythonValue(value)}`);
  }
  if (own.length) more.push(`parameters={${own.join(", ")}}`);
  return more;
}

/** What the constructor of a client takes. */
function clientArguments({ place, isEncrypted }) {
  return JSON.stringify(place) + (isEncrypted ? ", ssl=True" : "");
}

function needsJson(tensors) {
  return tensors.some((tensor) => !tensor.raw && tensor.data.length > MAX_SHOWN);
}

function python(model, version, tensors, options, places) {
  return [
    ...(needsJson(tensors) ? ["import json", ""] : []),
    "import numpy as np",
    "import tritonclient.http as triton",
    "",
    `client = triton.InferenceServerClient(${clientArguments(places.http)})`,
    ...pythonInputs(tensors),
    `result = client.infer(${[JSON.stringify(model), "inputs", ...pythonOptions(version, options)].join(", ")})`,
    'for output in result.get_response()["outputs"]:',
    '    print(output["name"], result.as_numpy(output["name"]))',
  ].join("\n");
}

function pythonOfStream(model, version, tensors, options, places) {
  if (!places.grpc) return "# A decoupled model answers over gRPC, which the gateway does not serve: use curl.";
  return [
    ...(needsJson(tensors) ? ["import json"] : []),
    "import queue",
    "",
    "import numpy as np",
    "import tritonclient.grpc as triton",
    "",
    `client = triton.InferenceServerClient(${clientArguments(places.grpc)})`,
    ...pythonInputs(tensors),
    "answers = queue.Queue()",
    "client.start_stream(lambda result, error: answers.put((result, error)))",
    `client.async_stream_infer(${[JSON.stringify(model), "inputs", ...pythonOptions(version, options), "enable_empty_final_response=True"].join(", ")})`,
    "while True:",
    "    result, error = answers.get()",
    "    if error:",
    "        raise error",
    "    for output in result.get_response().outputs:",
    "        print(output.name, result.as_numpy(output.name))",
    '    if result.get_response().parameters["triton_final_response"].bool_param:',
    "        break",
    "client.stop_stream()",
  ].join("\n");
}

function nats(model, version, tensors, json, isLong, places, isDecoupled) {
  const subject = `infer.${token(model)}${version ? `.v${version}` : ""}`;
  if (isBinary(tensors) && tensors.some((tensor) => tensor.raw)) return `# A file's bytes do not fit an argument of the shell; a program can send them: see docs/nats.md.\n# Subject: ${subject}, header Inference-Header-Content-Length: the length of the JSON before the bytes.`;
  const { file, url } = places.nats;
  const access = file ? `export NATS_URL=$(cat ${quotedPath(file)})` : `export NATS_URL=${quotedPath(url)}   # with your user and password, if the server asks for them`;
  const more = isDecoupled ? " --replies=0 --reply-timeout=5s" : "";
  return `${access}\nnats request${more} ${quoted(subject)} ${isLong ? '"$(cat request.json)"' : quoted(json)}`;
}

/** A path or URL as one word of the shell. */
function quotedPath(text) {
  return /^[A-Za-z0-9_./:@,+=-]+$/.test(text) ? text : quoted(text);
}

/** A model's name as one token of a subject. */
function token(name) {
  const isPlain = (byte) => /[A-Za-z0-9_-]/.test(String.fromCharCode(byte));
  return Array.from(new TextEncoder().encode(name), (byte) => (isPlain(byte) ? String.fromCharCode(byte) : `=${byte.toString(16).toUpperCase().padStart(2, "0")}`)).join("");
}
