// Jobs: offline jobs with their progress; submit one by upload.

import { act, segment } from "../core/api.js";
import { bytes, count, grouped, moment, number, percent, seconds, sentence } from "../core/format.js";
import { html, useMemo, useRef, useState } from "../core/html.js";
import { refresh, usePoll } from "../core/polling.js";
import { go, link } from "../core/router.js";
import { Action, Field, readOnly, Reason, ReadOnlyNote, State, Waiting } from "../components/controls.js";
import { cells, numeric, Table } from "../components/table.js";

const TONES = { queued: "idle", running: "good", paused: "warn", cancelling: "warn", cancelled: "idle", succeeded: "good", failed: "bad" };

/** How good the state of a job is: one in which items failed is not good, whatever became of the others. */
export function toneOf(job) {
  if (job.failed) return job.failed * 2 >= job.done ? "bad" : "warn";
  return TONES[job.state] ?? "idle";
}

/** The state of a job in words: "succeeded" is one without a failed item. */
export function stateText(job) {
  return job.state === "succeeded" && job.failed ? `done, ${grouped(job.failed)} of ${grouped(job.done)} failed` : job.state;
}

const MAX_UPLOAD_BYTES = 8 << 20;

/** The folder for items that were sent with a job. */
const UPLOADS = "/weir-uploads/";

function listOf(data) {
  return Array.isArray(data) ? data : (data?.jobs ?? []);
}

export function Jobs({ route, session }) {
  const { data, error } = usePoll("/api/jobs", 1000);
  const [isOpen, setOpen] = useState(false);
  const id = route.path[1] ?? "";
  // Without a gateway the jobs are as they were, and how fast they go is unknown.
  const isOld = Boolean(error);
  const rows = useMemo(() => listOf(data).map((job) => ({ ...job, outcome: stateText(job), progress: job.total ? job.done / job.total : null, ...(isOld ? { rate_per_s: null, left_s: null } : {}) })), [data, isOld]);
  const columns = useMemo(
    () => [
      { title: "Job", field: "id", formatter: cells.text((one) => one.replace("batch-", ""), "mono"), widthGrow: 2, minWidth: 110 },
      { title: "Model", field: "model", widthGrow: 3, minWidth: 90, longest: 260 },
      { title: "State", field: "outcome", formatter: cells.state((_, job) => toneOf(job)), widthGrow: 2, minWidth: 100, longest: 240 },
      { title: "Done", field: "progress", formatter: cells.share((share, row) => `${grouped(row.done)}${row.total ? ` of ${grouped(row.total)}` : ""}`), sorter: "number", widthGrow: 2, minWidth: 110 },
      numeric("Failed", "failed", grouped, { responsive: 2 }),
      numeric("Rate", "rate_per_s", (rate) => (rate ? `${number(rate)}/s` : rate === null ? "–" : ""), { responsive: 3 }),
      numeric("Left", "left_s", (left, row) => (row.state === "running" ? seconds(left) : ""), { responsive: 2 }),
      numeric("Submitted", "created_ms", moment, { responsive: 4, minWidth: 100 }),
    ],
    [],
  );
  return html`
    <header class="view-head">
      <h1>Jobs</h1>
      <p class="note">Offline jobs run a model over files, in the capacity that live requests leave.</p>
      <div class="controls"><button type="button" class="primary" aria-expanded=${String(isOpen)} onClick=${() => setOpen(!isOpen)}>${isOpen ? "Close the form" : "Submit a job"}</button></div>
    </header>
    <${ReadOnlyNote} session=${session} />
    ${isOpen ? html`<${Submit} session=${session} onDone=${(job) => (setOpen(false), go(["jobs", job.id]))} />` : null}
    ${!data ? html`<${Waiting} error=${error} what="the jobs" />` : null}
    ${data && error ? html`<p class="failure" role="alert">${sentence(error.message)} What you see is from before.</p>` : null}
    ${id ? html`<${Job} key=${id} id=${id} listed=${rows.find((job) => job.id === id)} session=${session} />` : null}
    ${data ? html`<${Table} label="Jobs" columns=${columns} rows=${rows} chosen=${id} sort=${[{ column: "created_ms", dir: "desc" }]} onOpen=${(row) => go(["jobs", row.id])} empty="No job" />` : null}
  `;
}

const FINAL = new Set(["succeeded", "failed", "cancelled"]);

function Job({ id, listed, session }) {
  const { data, error } = usePoll(`/api/jobs/${segment(id)}`, 1000);
  const job = error && data ? { ...data, rate_per_s: null, left_s: null } : (data ?? listed);
  if (!job) return html`<${Waiting} error=${error} what="the job" />`;
  const path = `/api/jobs/${segment(id)}`;
  const run = (verb, done) => async () => {
    await act("POST", `${path}/${verb}`);
    refresh("/api/jobs", { withParts: true });
    return done;
  };
  const isOver = FINAL.has(job.state);
  const share = job.total ? job.done / job.total : null;
  const isUploaded = job.input?.length === 1 && job.input[0].includes(UPLOADS);
  const hasLines = job.output_format === "jsonl";
  return html`<section class="panel wide" aria-label="Job ${id}">
    <header>
      <h2>${job.id}</h2>
      <${State} tone=${toneOf(job)}>${stateText(job)}</${State}>
      <button type="button" class="plain" aria-label="Close" onClick=${() => go(["jobs"])}>×</button>
    </header>
    <div class="progress" role="progressbar" aria-label="Progress" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${share === null ? null : Math.round(share * 100)} style="--share: ${(share ?? 0) * 100}%"></div>
    <p>
      ${grouped(job.done)}${job.total ? ` of ${count(job.total, "item")} (${percent(share)})` : " items"}${job.failed ? html`, <b class="bad-text">${grouped(job.failed)} failed</b>` : ""}${job.state === "running" && job.rate_per_s ? `, ${number(job.rate_per_s)} items/s` : ""}${job.state === "running" && job.left_s !== null && job.left_s !== undefined ? `, ${seconds(job.left_s)} left` : ""}
    </p>
    ${job.note ? html`<div class="problem warning"><${Reason} className="" text=${job.note} /></div>` : null}
    ${job.error ? html`<${Reason} text=${job.error} />` : null}
    <p class="buttons">
      ${job.state === "paused"
        ? html`<${Action} label="Resume" tone="primary" title="Goes on with the first item that is not done" session=${session} run=${run("resume", "The job goes on")} />`
        : html`<${Action} label="Pause" title="Stops taking items; those in flight are finished" session=${session} reason=${isOver ? `The job has ${job.state}.` : ""} run=${run("pause", "The job is paused")} />`}
      <${Action} label="Cancel" title="Ends the job; results so far stay" session=${session} reason=${isOver ? `The job has ${job.state}.` : ""} confirm=${{ title: "Cancel this job?", text: `${grouped(job.done)} items are done; their results stay. The others are not run.` }} run=${run("cancel", "The job is being cancelled")} />
      <${Action} label="Retry" title="Runs the failed items again, in their places, and what was not done" session=${session} reason=${!isOver ? "The job still runs." : job.state === "succeeded" && !job.failed ? "No item failed." : ""} run=${run("retry", "Failed items run again")} />
      ${isOver && hasLines ? html`<a class="button" href="${path}/result" download="${job.id}.jsonl">Results</a>` : null}
      <${Action}
        label="Delete"
        tone="danger"
        title="Removes the job from the list, and items that were sent with it"
        session=${session}
        reason=${isOver ? "" : "Cancel the job first."}
        confirm=${{ title: "Delete this job?", text: "Items that were sent with the job are deleted, and their results; files on the server stay." }}
        run=${async () => {
          await act("DELETE", path);
          go(["jobs"]);
          refresh("/api/jobs");
          return "The job is deleted";
        }}
      />
    </p>
    <dl class="facts">
      <div><dt>Model</dt><dd><a href=${link(["models", job.model])}>${job.model}</a></dd></div>
      ${job.input?.length ? html`<div><dt>Input</dt><dd>${isUploaded ? "sent with the job" : [job.input].flat().join(", ")}</dd></div>` : null}
      ${job.output && !isUploaded ? html`<div><dt>Output</dt><dd>${job.output}</dd></div>` : null}
      <div><dt>Submitted</dt><dd>${moment(job.created_ms)}</dd></div>
      ${job.started_ms ? html`<div><dt>Started</dt><dd>${moment(job.started_ms)}</dd></div>` : null}
      ${job.ended_ms ? html`<div><dt>Ended</dt><dd>${moment(job.ended_ms)}</dd></div>` : null}
    </dl>
  </section>`;
}

function Submit({ session, onDone }) {
  const models = usePoll("/api/models", 5000);
  const names = (models.data?.models ?? []).filter((model) => model.loaded).map((model) => model.id).sort();
  const [way, setWay] = useState("upload");
  const [model, setModel] = useState("");
  const [file, setFile] = useState(null);
  const [input, setInput] = useState("");
  const [output, setOutput] = useState("");
  const [isOver, setOver] = useState(false);
  const picker = useRef(null);
  const isTooLong = file && file.size > MAX_UPLOAD_BYTES;
  const reason = !model ? "Choose a model." : way === "upload" ? (!file ? "Choose a file." : isTooLong ? "The file is too long to be sent: put it into a folder of --batch-root." : "") : !input.trim() || !output.trim() ? "Name the input and the output." : "";
  async function run() {
    const job =
      way === "upload"
        ? await act("POST", `/api/jobs?${new URLSearchParams({ model })}`, file, { "Content-Type": "application/jsonl" })
        : await act("POST", "/api/jobs", { model, input: input.split(/\s*[\n,]\s*/).filter(Boolean), output: output.trim() });
    refresh("/api/jobs");
    onDone(job);
    return `Job ${job.id} is submitted`;
  }
  const drop = {
    onDragOver: (event) => (event.preventDefault(), setOver(true)),
    onDragLeave: () => setOver(false),
    onDrop: (event) => {
      event.preventDefault();
      setOver(false);
      setFile(event.dataTransfer.files[0] ?? null);
    },
  };
  return html`<section class="panel wide" aria-label="Submit a job">
    <h2>Submit a job</h2>
    <div class="row">
      <${Field} label="Model">${(id) => html`<select id=${id} value=${model} onChange=${(event) => setModel(event.target.value)}><option value="">Choose a model</option>${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select>`}</${Field}>
      <${Field} label="Items">${(id) => html`<select id=${id} value=${way} onChange=${(event) => setWay(event.target.value)}><option value="upload">a file from here, as JSON Lines</option><option value="server">files on the server</option></select>`}</${Field}>
    </div>
    ${way === "upload"
      ? html`<div class="drop ${isOver ? "over" : ""}" ...${drop}>
          <p>${file ? html`<b>${file.name}</b> ${bytes(file.size)}` : "Drop a .jsonl file here: an item in each line, as {\"INPUT\": value}"}</p>
          <button type="button" onClick=${() => picker.current.click()}>Choose a file</button>
          <input ref=${picker} type="file" hidden aria-label="Items" accept=".jsonl,.ndjson,.json,.txt" onChange=${(event) => setFile(event.target.files[0] ?? null)} />
        </div>`
      : html`<div class="row">
          <${Field} label="Input" note="Paths or patterns below a --batch-root">${(id) => html`<input id=${id} class="long" placeholder="/data/in/*.jsonl" value=${input} onInput=${(event) => setInput(event.target.value)} />`}</${Field}>
          <${Field} label="Output" note="A new or empty folder">${(id) => html`<input id=${id} class="long" placeholder="/data/out" value=${output} onInput=${(event) => setOutput(event.target.value)} />`}</${Field}>
        </div>`}
    <p class="buttons"><${Action} label="Submit" tone="primary" title="Runs ${model || "the model"} on each item" session=${session} reason=${reason} run=${run} />${readOnly(session) ? html`<span class="note">${readOnly(session)}</span>` : null}</p>
  </section>`;
}
