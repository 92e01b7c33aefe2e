// Requests: look one up by its id, and see its way as a waterfall; or watch recent ones.

import { segment } from "../core/api.js";
import { clock, milliseconds, moment, seconds, shortId } from "../core/format.js";
import { html, useEffect, useMemo, useState } from "../core/html.js";
import { usePoll } from "../core/polling.js";
import { go, link, replaceQuery } from "../core/router.js";
import { Reason, State, Waiting } from "../components/controls.js";
import { cells, numeric, Table } from "../components/table.js";
import { Waterfall } from "../components/waterfall.js";

const OUTCOMES = { succeeded: "good", failed: "bad", expired: "warn", cancelled: "idle", "dead-lettered": "bad" };
const LOOK_AGAIN_MS = 2000;

export function Requests({ route }) {
  const id = route.path[1] ?? "";
  const model = route.query.model ?? "";
  const [text, setText] = useState(id);
  useEffect(() => setText(id), [id]);
  function lookUp(event) {
    event.preventDefault();
    if (text.trim()) go(["requests", text.trim()]);
  }
  return html`
    <header class="view-head">
      <h1>Requests</h1>
      <form class="controls" role="search" onSubmit=${lookUp}>
        <input type="search" class="long" aria-label="Id of a request" placeholder="Id of a request" value=${text} onInput=${(event) => setText(event.target.value)} />
        <button type="submit" class="primary">Look up</button>
      </form>
    </header>
    ${id ? html`<${OneRequest} key=${id} id=${id} />` : null}
    <${Recent} model=${model} chosen=${id} />
  `;
}

function OneRequest({ id }) {
  const { data, error } = usePoll(`/api/requests/${segment(id)}`, LOOK_AGAIN_MS);
  if (!data) return html`<${Waiting} error=${error} what="the request" />`;
  if (data.found === "none") {
    return html`<section class="panel wide"><h2>${id}</h2>
      <p>No request with this id is known. A live request is seen only while it runs and shortly after, if the console asked for it then; a durable one as long as its record is kept.</p>
      <p class="note">The page looks again every ${LOOK_AGAIN_MS / 1000} s: send the request now to see its way.</p>
    </section>`;
  }
  return html`<section class="panel wide" aria-label="Request ${id}">
    <h2>${id}</h2>
    ${data.trace ? html`<${Trace} trace=${data.trace} />` : null}
    ${data.record ? html`<${Record} record=${data.record} />` : null}
  </section>`;
}

function Trace({ trace }) {
  const mates = (trace.batch?.with ?? []).filter((one) => one !== trace.id);
  return html`
    <dl class="facts">
      <div><dt>Model</dt><dd><a href=${link(["models", trace.model])}>${trace.model}</a>, version ${trace.version}</dd></div>
      <div><dt>Came over</dt><dd>${trace.protocol}</dd></div>
      ${trace.worker ? html`<div><dt>Ran on</dt><dd><a href=${link(["topology"], { process: trace.worker })}>${shortId(trace.worker)}</a>, instance ${trace.instance}</dd></div>` : null}
      ${trace.batch ? html`<div><dt>Batch</dt><dd>${trace.batch.id}, ${trace.batch.size === 1 ? "alone" : `${trace.batch.size} rows`}</dd></div>` : null}
      ${mates.length ? html`<div><dt>With</dt><dd>${mates.slice(0, 12).map((mate) => html`<a key=${mate} class="mate" title=${mate} href=${link(["requests", mate])}>${mate.startsWith(`${trace.gateway}/`) ? mate.slice(trace.gateway.length + 1) : shortId(mate)}</a> `)}${mates.length > 12 ? `and ${mates.length - 12} more` : ""}</dd></div>` : null}
    </dl>
    <${Waterfall} spans=${trace.spans} label="The way of the request" />
  `;
}

function Record({ record }) {
  const outcome = record.outcome;
  return html`
    <h3>Record</h3>
    <p><${State} tone=${OUTCOMES[outcome] ?? "idle"}>${outcome || "unknown"}</${State}>${record.attempts ? ` after ${record.attempts === 1 ? "one attempt" : `${record.attempts} attempts`}` : ""}</p>
    <dl class="facts">
      <div><dt>Model</dt><dd><a href=${link(["models", record.model])}>${record.model}</a>${record.version ? `, version ${record.version}` : ""}</dd></div>
      <div><dt>Accepted</dt><dd>${moment(record.accepted_ms)}</dd></div>
      <div><dt>Ended</dt><dd>${moment(record.ended_ms)}${record.accepted_ms ? `, after ${seconds((record.ended_ms - record.accepted_ms) / 1000)}` : ""}</dd></div>
      ${record.tenant ? html`<div><dt>Tenant</dt><dd>${record.tenant}</dd></div>` : null}
    </dl>
    ${record.history?.length ? html`<h3>Attempts</h3><ol class="texts">${record.history.map((attempt, place) => html`<li key=${place}><${Reason} className="" text="${moment(attempt.ended_ms)}: ${attempt.reason}" /></li>`)}</ol>` : null}
  `;
}

function Recent({ model, chosen }) {
  const [isPaused, setPaused] = useState(false);
  const models = usePoll("/api/models", 5000);
  const { data, error } = usePoll(isPaused ? "" : `/api/requests?${new URLSearchParams(model ? { model, limit: 50 } : { limit: 50 })}`, 1000);
  const [kept, setKept] = useState([]);
  useEffect(() => {
    if (data) setKept(Array.isArray(data) ? data : (data.requests ?? []));
  }, [data]);
  const rows = useMemo(() => kept.map((request) => ({ ...request, row: `${request.key}/${request.id}` })), [kept]);
  const columns = useMemo(
    () => [
      { title: "At", field: "at_ms", formatter: cells.text(clock, "number"), minWidth: 84 },
      { title: "Id", field: "id", formatter: cells.text((id, row) => id || row.key, "mono"), widthGrow: 3, minWidth: 120, longest: 260 },
      { title: "Model", field: "model", widthGrow: 2, minWidth: 90, longest: 260 },
      numeric("Version", "version", (version) => version || "", { responsive: 3 }),
      { title: "Over", field: "protocol", responsive: 2 },
      numeric("Took", "duration_ms", milliseconds),
      { title: "Status", field: "status", formatter: cells.state((status) => (isGood(status) ? "good" : "bad"), (status) => (isGood(status) ? "ok" : String(status))), responsive: 1 },
    ],
    [],
  );
  const names = (models.data?.models ?? []).filter((one) => one.loaded).map((one) => one.id);
  return html`
    <header class="view-head second">
      <h2>Recent</h2>
      <p class="note">A sample of the requests that end now; while you look at it, gateways report some of them.</p>
      <div class="controls">
        <select aria-label="Model" value=${model} onChange=${(event) => replaceQuery({ model: event.target.value })}>
          <option value="">All models</option>
          ${[...new Set(model ? [model, ...names] : names)].map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select>
        <button type="button" aria-pressed=${String(isPaused)} onClick=${() => setPaused(!isPaused)}>${isPaused ? "Continue" : "Hold"}</button>
      </div>
    </header>
    ${error && !kept.length ? html`<${Waiting} error=${error} />` : null}
    <${Table} label="Recent requests" columns=${columns} rows=${rows} rowKey="row" chosen=${chosen} sort=${[{ column: "at_ms", dir: "desc" }]} onOpen=${(row) => go(["requests", row.id || row.key], model ? { model } : {})} maxHeight="50vh" empty="No request has ended since you opened this page" />
  `;
}

function isGood(status) {
  return status === "ok" || status === "succeeded" || status === 200 || status === 0;
}
