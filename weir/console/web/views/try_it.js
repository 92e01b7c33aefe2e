// Try it: a form made from a model's metadata, the response, the latency by hop, and the same request to copy.

import { act, segment } from "../core/api.js";
import { milliseconds, sentence } from "../core/format.js";
import { html, useCallback, useEffect, useMemo, useState } from "../core/html.js";
import { usePoll } from "../core/polling.js";
import { go, link, replaceQuery } from "../core/router.js";
import { Code, Field, Reason, State, Tabs, Waiting } from "../components/controls.js";
import { SequenceChart } from "../components/sequence_chart.js";
import { Waterfall } from "../components/waterfall.js";
import { asBody, hasBatch, isBinary, wantedOutputs } from "../tensors/request.js";
import { snippets } from "../tensors/snippets.js";
import { hasFinding } from "./problems.js";
import { InputCard, startInput, tensorsOf } from "./try_input.js";
import { Outputs } from "./try_outputs.js";

const MAX_CHUNKS = 2000;
const LOOK_AGAIN_MS = 2000;

const NO_GATEWAY = "No gateway replies: no request can be sent until one does.";

export function TryIt({ route, status, session }) {
  const name = route.path[1] ?? "";
  const index = usePoll("/api/models", 5000);
  const names = (index.data?.models ?? []).filter((model) => model.loaded).map((model) => model.id);
  // The form is made once: what changes later must not take away what was typed.
  const [held, setHeld] = useState(null);
  const isHeld = held?.id === name;
  const chosenMs = useMemo(() => Date.now(), [name]);
  const { data, error, atMs } = usePoll(name && !isHeld ? `/api/models/${segment(name)}` : "", LOOK_AGAIN_MS);
  const isNew = atMs >= chosenMs - LOOK_AGAIN_MS; // what another view asked for earlier may be old
  const model = isHeld ? held : isNew ? data : null;
  useEffect(() => {
    if (isNew && data?.metadata && data.id === name) setHeld(data);
  }, [data, isNew, name]);
  const hasGateway = !hasFinding(status.data, "no gateway");
  return html`
    <header class="view-head">
      <h1>Try it</h1>
      <div class="controls">
        <select aria-label="Model" value=${name} onChange=${(event) => event.target.value && go(["try", event.target.value])}>
          <option value="">Choose a model</option>
          ${[...new Set(name ? [...names, name] : names)].sort().map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
        </select>
        ${model && model.versions?.length > 1
          ? html`<select aria-label="Version" value=${route.query.version ?? ""} onChange=${(event) => replaceQuery({ version: event.target.value })}>
              <option value="">the version that traffic chooses</option>
              ${model.versions.map((version) => numberOf(version)).map((version) => html`<option key=${version} value=${version}>version ${version}</option>`)}
            </select>`
          : null}
        ${name ? html`<a class="button" href=${link(["models", name])}>About the model</a>` : null}
      </div>
    </header>
    ${!name ? html`<${Gallery} models=${index.data?.models} error=${index.error} />` : null}
    ${name && !model ? html`<${Waiting} error=${error} what="the model's metadata" />` : null}
    ${name && model && !model.metadata ? html`<${NoForm} name=${name} model=${model} hasGateway=${hasGateway} isLoadable=${index.data?.control_mode === "explicit"} />` : null}
    ${name && model?.metadata ? html`<${Form} key=${name} id=${name} model=${model} version=${route.query.version ?? ""} places=${placesOf(status.data, session)} hasGateway=${hasGateway} />` : null}
  `;
}

function numberOf(version) {
  return typeof version === "object" ? version.version : version;
}

/** Why there is no form. */
function NoForm({ name, model, hasGateway, isLoadable }) {
  if (!hasGateway) return html`<p class="failure" role="alert">${NO_GATEWAY}</p>`;
  if (model.reason) return html`<p>The model is not loaded:</p><${Reason} isAlert text=${model.reason} /><p><a href=${link(["models", name])}>About the model</a></p>`;
  if (model.denied?.metadata) return html`<p class="failure" role="alert">You may not see the model's inputs: ${model.denied.metadata}.</p>`;
  if (model.versions.length) return html`<${Waiting} what="the model's metadata" />`;
  return html`<p class="note">No worker serves the model. ${isLoadable ? html`<a href=${link(["models", name])}>Load it</a> first.` : null}</p>`;
}

/**
 * Where the same request can be sent: `{http, grpc, nats}`, of which `http` and `grpc` are `{place, isEncrypted}` of a gateway,
 * `place` as `host:port`, and `nats` is how to get to the NATS server; null until a gateway is known.
 */
function placesOf(status, session) {
  const gateways = (status?.roles ?? []).filter((role) => role.role === "gateway" && role.state !== "silent");
  const urls = gateways.flatMap((role) => role.urls).filter((url) => !url.endsWith("/metrics"));
  const placeOf = (scheme) => {
    const [, secure, place] = urls.map((url) => url.match(`^${scheme}(s?)://(.*)`)).find(Boolean) ?? [];
    return place ? { place, isEncrypted: Boolean(secure) } : null;
  };
  const http = placeOf("http");
  if (!http || !session) return null;
  const { access_file: file, url } = session.cluster;
  return { http, grpc: placeOf("grpc"), nats: file ? { file } : { url }, needsKey: Boolean(session.needs_key) };
}

function Gallery({ models, error }) {
  if (!models) return html`<${Waiting} error=${error} what="the models" />`;
  const loaded = models.filter((model) => model.loaded);
  if (!loaded.length) return html`<p class="note">No model is loaded. <a href=${link(["models"])}>Load one</a>.</p>`;
  return html`<p class="note">Choose a model. You get a form for its inputs, filled with a sample.</p>
    <ul class="names large">${loaded.slice(0, 60).map((model) => html`<li key=${model.id}><a href=${link(["try", model.id])}>${model.name}</a></li>`)}</ul>`;
}

function Form({ id, model, version, places, hasGateway }) {
  const { metadata, config } = model;
  const isSequence = Boolean(config?.sequence_batching);
  const labels = model.labels ?? {};
  const [inputs, setInputs] = useState(() => metadata.inputs.map((input) => startInput(input, model)));
  const [wantsLabels, setWantsLabels] = useState(Object.keys(labels).length > 0);
  const [sequence, setSequence] = useState({ id: newSequenceId(), start: true, end: true });
  const [result, setResult] = useState(null);
  const [isRunning, setRunning] = useState(false);
  const change = useCallback((place, changes) => setInputs((current) => current.map((input, at) => (at === place ? { ...input, ...changes } : input))), []);
  const options = useMemo(
    () => ({
      outputs: wantedOutputs(metadata, labels, wantsLabels),
      parameters: { ...(model.sample?.parameters ?? {}), ...(isSequence ? { sequence_id: sequence.id, sequence_start: sequence.start, sequence_end: sequence.end } : {}) },
    }),
    [model, wantsLabels, sequence, isSequence],
  );
  const built = useMemo(() => {
    try {
      return { tensors: tensorsOf(inputs), problem: "" };
    } catch (error) {
      return { tensors: null, problem: error.message };
    }
  }, [inputs]);
  const sound = inputs.find((input) => input.chunks);
  const ask = useCallback(
    (tensors, changes = {}) => {
      const { body, headers } = asBody(tensors, { ...options, ...changes });
      return act("POST", `/api/try/${segment(id)}${version ? `?version=${version}` : ""}`, body, headers);
    },
    [options, id, version],
  );

  async function run() {
    if (built.problem || isRunning || !hasGateway) return;
    setRunning(true);
    try {
      if (sound) await runSequence();
      else setResult({ answer: await ask(built.tensors), tensors: built.tensors });
    } catch (error) {
      setResult({ error });
    } finally {
      setRunning(false);
      if (isSequence) setSequence((current) => (sound || current.end ? { ...current, id: newSequenceId(), start: true } : { ...current, start: false }));
    }
  }

  /** Sends the chunks of a sound one after another as one sequence, and keeps the first value of the first output. */
  async function runSequence() {
    const chunks = sound.chunks.slice(0, MAX_CHUNKS);
    const id = newSequenceId();
    const values = [];
    let answer = null;
    for (const [at, chunk] of chunks.entries()) {
      const tensors = built.tensors.map((tensor) => (tensor.name === sound.name ? { ...tensor, data: chunk } : tensor));
      const parameters = isSequence ? { sequence_id: id, sequence_start: at === 0, sequence_end: at === chunks.length - 1 } : {};
      answer = await ask(tensors, { parameters });
      if (answer.status >= 400) break;
      values.push(Number([responsesOf(answer.response)[0].outputs[0].data].flat(Infinity)[0]));
      if (at % 10 === 0) setResult({ answer, sequence: { values: [...values], samples: sound.samples, rate: sound.rate, chunk: chunk.length, name: answer.response.outputs[0].name, total: chunks.length } });
    }
    setResult({ answer, sequence: { values: [...values], samples: sound.samples, rate: sound.rate, chunk: chunks[0].length, name: answer.response?.outputs?.[0]?.name ?? "", total: chunks.length } });
  }

  function onKeyDown(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      run();
    }
  }
  const known = places && JSON.stringify(places);
  const copies = useMemo(() => (built.tensors && places ? snippets({ model: id, version, tensors: built.tensors, options, places, declared: metadata.inputs, isDecoupled: Boolean(config?.model_transaction_policy?.decoupled) }) : null), [built, options, version, known]);
  return html`<div class="try" onKeyDown=${onKeyDown}>
    <section aria-label="Request">
      ${inputs.map((input, place) => html`<${InputCard} key=${input.name} input=${input} hasBatch=${hasBatch(config)} onChange=${(changes) => change(place, changes)} />`)}
      ${isSequence && !sound ? html`<${SequenceFields} sequence=${sequence} onChange=${setSequence} />` : null}
      ${Object.keys(labels).length
        ? html`<label class="check"><input type="checkbox" checked=${wantsLabels} onChange=${(event) => setWantsLabels(event.target.checked)} /> Ask for the best classes of ${Object.keys(labels).join(", ")}</label>`
        : null}
      ${built.problem ? html`<p class="failure" role="alert">${built.problem}</p>` : null}
      ${hasGateway ? null : html`<p class="failure">${NO_GATEWAY}</p>`}
      <p class="buttons">
        <button type="button" class="primary" aria-disabled=${built.problem || isRunning || !hasGateway ? "true" : null} title="Sends the request to a gateway, as any client (Ctrl+Enter)" onClick=${run}>
          ${isRunning ? "Running…" : sound ? `Send ${Math.min(sound.chunks.length, MAX_CHUNKS)} chunks` : "Send request"}
        </button>
        ${built.tensors && isBinary(built.tensors) ? html`<span class="note">Sent as JSON with raw tensors behind it.</span>` : null}
      </p>
      ${built.tensors ? html`<${Copies} copies=${copies} needsKey=${Boolean(places?.needsKey)} />` : null}
    </section>
    <section aria-label="Response" aria-live="polite" class="response">
      ${result ? html`<${Response} result=${result} labels=${labels} />` : html`<p class="waiting">The response appears here, with the time that each hop took.</p>`}
    </section>
  </div>`;
}

function newSequenceId() {
  return 1 + Math.floor(Math.random() * 0x7fffffff);
}

function SequenceFields({ sequence, onChange }) {
  return html`<fieldset class="card">
    <legend>Sequence</legend>
    <${Field} label="Id">${(id) => html`<input id=${id} inputmode="numeric" value=${sequence.id} onInput=${(event) => onChange({ ...sequence, id: Number(event.target.value) || 0 })} />`}</${Field}>
    <label class="check"><input type="checkbox" checked=${sequence.start} onChange=${(event) => onChange({ ...sequence, start: event.target.checked })} /> starts here</label>
    <label class="check"><input type="checkbox" checked=${sequence.end} onChange=${(event) => onChange({ ...sequence, end: event.target.checked })} /> ends here</label>
  </fieldset>`;
}

function Response({ result, labels }) {
  const [tab, setTab] = useState("outputs");
  if (result.error) return html`<${Reason} isAlert text=${sentence(result.error.message)} />`;
  const { answer } = result;
  const hasFailed = answer.status >= 400;
  return html`
    <header class="response-head">
      <${State} tone=${hasFailed ? "bad" : "good"}>${hasFailed ? `failed with ${answer.status}` : "succeeded"}</${State}>
      <b class="duration">${milliseconds(answer.duration_ms)}</b>
      ${answer.hops?.length ? html`<a href=${link(["requests", answer.id])}>This request</a>` : null}
      ${answer.response?.model_version ? html`<span class="note">version ${answer.response.model_version}</span>` : null}
      ${result.sequence ? html`<span class="note">chunk ${result.sequence.values.length} of ${result.sequence.total}</span>` : null}
    </header>
    ${hasFailed ? html`<${Reason} isAlert text=${errorOf(answer)} />` : null}
    ${result.sequence ? html`<${SequenceChart} ...${result.sequence} />` : null}
    ${answer.hops?.length ? html`<h2 class="small-head">Where the time went</h2><${Waterfall} spans=${answer.hops} label="The request by hop" />` : null}
    ${answer.response && !hasFailed
      ? html`<${Tabs} label="Response" tabs=${[["outputs", "Outputs"], ["json", "JSON"]]} current=${tab} onChoose=${setTab} />
          ${tab === "outputs" ? responsesOf(answer.response).map((response, place) => html`<${Outputs} key=${place} outputs=${response.outputs ?? []} labels=${labels} />`) : html`<${Code} text=${shortJson(answer.response)} />`}`
      : null}
  `;
}

/** The error of an answer that failed: that of the last response, where a decoupled model has sent several. */
function errorOf(answer) {
  return responsesOf(answer.response ?? {}).at(-1)?.error ?? `status ${answer.status}`;
}

/** The responses in an answer: a decoupled model sends any number of them. */
function responsesOf(response) {
  return response.responses ?? [response];
}

/** A response as JSON in lines; long lists are cut. */
function shortJson(response) {
  const cut = (value) => {
    if (Array.isArray(value)) return value.length > 100 && typeof value[0] !== "object" ? [...value.slice(0, 100), `… ${value.length - 100} more`] : value.map(cut);
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, cut(inner)]));
    return value;
  };
  return JSON.stringify(cut(response), null, 1).replace(/\[\s+([^[\]{}]*?)\s+\]/gs, (whole, inner) => `[${inner.replace(/\s*\n\s*/g, " ")}]`);
}

function Copies({ copies, needsKey }) {
  const [tab, setTab] = useState("curl");
  function download() {
    const anchor = document.createElement("a");
    anchor.href = URL.createObjectURL(new Blob([copies.document], { type: "application/json" }));
    anchor.download = copies.needsFile;
    anchor.click();
    URL.revokeObjectURL(anchor.href);
  }
  if (!copies) return html`<section class="copies" aria-label="The same request elsewhere"><p class="note">The same request as a command is shown once the address of a gateway is known.</p></section>`;
  return html`<section class="copies" aria-label="The same request elsewhere">
    <h2 class="small-head">The same request</h2>
    <${Tabs} label="Language" tabs=${[["curl", "curl"], ["python", "Python"], ["nats", "nats"]]} current=${tab} onChoose=${setTab} />
    ${copies.needsFile ? html`<p class="note">It reads <button type="button" class="small" onClick=${download}>${copies.needsFile}</button></p>` : null}
    ${needsKey ? html`<p class="note">The server has an access policy: show your key too, in the header <code>Authorization: Bearer KEY</code>.</p>` : null}
    <${Code} text=${copies[tab]} />
  </section>`;
}
