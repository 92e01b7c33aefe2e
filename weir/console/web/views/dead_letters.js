// Dead letters: durable requests that could not be done; look into one, run it again, or delete it.

import { act, segment } from "../core/api.js";
import { bytes, count, grouped, moment } from "../core/format.js";
import { html, useMemo } from "../core/html.js";
import { refresh, usePoll } from "../core/polling.js";
import { go, link, replaceQuery } from "../core/router.js";
import { Action, Code, Reason, ReadOnlyNote, Waiting } from "../components/controls.js";
import { cells, numeric, Table } from "../components/table.js";

const LIMIT = 200;

export function DeadLetters({ route, session: whole, status }) {
  const session = whole && { ...whole, denied: "" }; // who may see the letters may replay and delete them
  const model = route.query.model ?? "";
  const seq = route.path[1] ?? "";
  const { data, error } = usePoll(`/api/dead?${new URLSearchParams({ ...(model ? { model } : {}), limit: LIMIT })}`, 2000);
  const columns = useMemo(
    () => [
      numeric("Number", "seq", grouped, { responsive: 2 }),
      { title: "Model", field: "model", widthGrow: 2, minWidth: 90, longest: 260 },
      { title: "Reason", field: "reason", formatter: cells.reason(), widthGrow: 6, minWidth: 150, longest: 420 },
      numeric("Attempts", "attempts", grouped, { responsive: 3 }),
      numeric("Size", "size_bytes", bytes, { responsive: 3 }),
      numeric("At", "at_ms", moment, { minWidth: 90 }),
      { title: "Id", field: "id", formatter: cells.text((id) => id, "mono"), responsive: 4, widthGrow: 2 },
    ],
    [],
  );
  const names = (status.data?.dead ?? []).map((row) => row.model);
  const query = model ? `?${new URLSearchParams({ model })}` : "";
  const about = model ? `of ${model}` : "of all models";
  const done = (text) => {
    refresh("/api/dead");
    refresh("/api/status");
    return text;
  };
  return html`
    <header class="view-head">
      <h1>Dead letters</h1>
      <p class="note">Durable requests that could not be done. They are kept for seven days.</p>
      <div class="controls">
        <select aria-label="Model" value=${model} onChange=${(event) => replaceQuery({ model: event.target.value })}>
          <option value="">All models</option>
          ${[...new Set(model ? [model, ...names] : names)].map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select>
        <${Action}
          label="Replay all"
          title="Runs all dead letters ${about} again"
          session=${session}
          reason=${data?.total ? "" : "There are none."}
          confirm=${{ title: `Replay ${count(data?.total ?? 0, "dead letter")}?`, text: `All dead letters ${about} go back to their queues and run again.` }}
          run=${async () => {
            await act("POST", `/api/dead/replay${query}`);
            return done(`Dead letters ${about} run again`);
          }}
        />
        <${Action}
          label="Purge all"
          tone="danger"
          title="Deletes all dead letters ${about}"
          session=${session}
          reason=${data?.total ? "" : "There are none."}
          confirm=${{ title: `Delete ${count(data?.total ?? 0, "dead letter")}?`, text: `All dead letters ${about} are deleted, with their payloads. This can't be undone.` }}
          run=${async () => {
            await act("POST", `/api/dead/purge${query}`);
            return done(`Dead letters ${about} are deleted`);
          }}
        />
      </div>
    </header>
    <${ReadOnlyNote} session=${session} />
    ${seq ? html`<${Letter} key=${seq} seq=${seq} session=${session} done=${done} />` : null}
    ${!data ? html`<${Waiting} error=${error} what="the dead letters" />` : null}
    ${data && !model && data.total > data.letters.length ? html`<p class="note">The newest ${data.letters.length} of ${grouped(data.total)}</p>` : null}
    ${data ? html`<${Table} label="Dead letters" columns=${columns} rows=${data.letters} rowKey="seq" chosen=${seq ? Number(seq) : null} sort=${[{ column: "at_ms", dir: "desc" }]} onOpen=${(row) => go(["dead", String(row.seq)], model ? { model } : {})} empty="No dead letter: every durable request was done" />` : null}
  `;
}

function Letter({ seq, session, done }) {
  const { data, error } = usePoll(`/api/dead/${segment(seq)}`, 30_000);
  if (!data) return html`<section class="panel wide"><${Waiting} error=${error} what="the dead letter" /></section>`;
  const path = `/api/dead/${segment(seq)}`;
  const { headers } = data;
  return html`<section class="panel wide" aria-label="Dead letter ${seq}">
    <header><h2>Dead letter ${seq}</h2><button type="button" class="plain" aria-label="Close" onClick=${() => go(["dead"])}>×</button></header>
    <${Reason} text=${data.reason} />
    <dl class="facts">
      <div><dt>Model</dt><dd><a href=${link(["models", data.model])}>${data.model}</a></dd></div>
      <div><dt>Request</dt><dd><a href=${link(["requests", data.id])}>${data.id}</a></dd></div>
      <div><dt>Attempts</dt><dd>${data.attempts}</dd></div>
      <div><dt>At</dt><dd>${moment(data.at_ms)}</dd></div>
    </dl>
    ${data.history?.length ? html`<h3>Attempts</h3><ol class="texts">${data.history.map((entry, place) => html`<li key=${place}><${Reason} className="" text=${typeof entry === "string" ? entry : historyText(entry)} /></li>`)}</ol>` : null}
    ${headers.length ? html`<h3>Headers</h3><dl class="facts">${headers.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${String(value)}</dd></div>`)}</dl>` : null}
    <h3>Payload <small>${bytes(data.size_bytes)}${data.preview.hex !== undefined ? ", as hexadecimal" : ""}</small></h3>
    <${Code} text=${previewOf(data)} />
    <p class="buttons">
      <${Action}
        label="Replay"
        tone="primary"
        title="Puts the request back into its queue: it runs again"
        session=${session}
        run=${async () => {
          await act("POST", `${path}/replay`);
          go(["dead"]);
          return done("The request runs again");
        }}
      />
      <${Action}
        label="Purge"
        tone="danger"
        title="Deletes this dead letter"
        session=${session}
        confirm=${{ title: "Delete this dead letter?", text: "The request and its payload are deleted. This can't be undone." }}
        run=${async () => {
          await act("DELETE", path);
          go(["dead"]);
          return done("The dead letter is deleted");
        }}
      />
    </p>
  </section>`;
}

function historyText(entry) {
  const { ended_ms: atMs, ...rest } = entry;
  const text = rest.reason ?? JSON.stringify(rest);
  return atMs ? `${moment(atMs)}: ${text}` : text;
}

function previewOf(data) {
  const text = data.preview.text ?? data.preview.hex;
  return data.is_complete ? text : `${text}\n… and more`;
}
