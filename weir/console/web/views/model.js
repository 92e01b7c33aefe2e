// One model: its versions and their shares of the traffic, load and unload, configuration, statistics, history.

import { act, segment } from "../core/api.js";
import { count, grouped, microseconds, milliseconds, moment, number, percent } from "../core/format.js";
import { html, useMemo } from "../core/html.js";
import { refresh, usePoll } from "../core/polling.js";
import { link, replaceQuery } from "../core/router.js";
import { Action, Figure, PlainTable, Reason, readOnly, ReadOnlyNote, State, Tabs, Waiting } from "../components/controls.js";
import { ModelCharts } from "./charts.js";
import { toneOf } from "./models.js";
import { hasFinding } from "./problems.js";
import { Traffic } from "./traffic.js";

const TABS = [
  ["versions", "Versions"],
  ["configuration", "Configuration"],
  ["statistics", "Statistics"],
  ["history", "History"],
];

/** Why models can't be loaded from here, by the control mode of the workers. */
const NO_LOADING = {
  none: "Models can't be loaded and unloaded from here: the workers load all models of the repository when they start (--model-control-mode=none). Start the server with --model-control-mode=explicit.",
  poll: "Models can't be loaded and unloaded from here: the workers follow the files of the repository (--model-control-mode=poll). Change the files, or start the server with --model-control-mode=explicit.",
};

export function Model({ id, route, session, status }) {
  const path = `/api/models/${segment(id)}`;
  const { data, error } = usePoll(path, 2000);
  const index = usePoll("/api/models", 1000);
  const row = index.data?.models.find((model) => model.id === id);
  const name = row?.name ?? data?.name ?? id;
  const hasGateway = !hasFinding(status.data, "no gateway");
  const noLoading = NO_LOADING[index.data?.control_mode] ?? "";
  const tab = TABS.some(([id]) => id === route.query.tab) ? route.query.tab : "versions";
  if (!data && !row) return html`<h1>${name}</h1><${Waiting} error=${error} what="the model" />`;
  return html`
    <header class="view-head">
      <p class="crumb"><a href=${link(["models"])}>Models</a></p>
      <h1>${name}</h1>
      ${row ? html`<${State} tone=${toneOf(row.state)}>${(row.state || "not loaded").toLowerCase()}</${State}>` : null}
      <div class="controls">
        <a class="button primary" href=${link(["try", id])}>Try it</a>
        <a class="button" href=${link(["batching", id])}>Watch batches</a>
        <a class="button" href=${link(["overview"], { model: id })}>Charts</a>
        <${LoadActions} name=${name} path=${path} row=${row} session=${session} reason=${hasGateway ? noLoading : "No gateway replies."} />
      </div>
    </header>
    ${row?.namespace ? html`<p class="note">Namespace ${row.namespace}</p>` : null}
    ${row?.reason ? html`<${Reason} className=${row.state === "READY" ? "note" : "failure"} text=${row.reason} />` : null}
    <${ReadOnlyNote} session=${session} />
    ${session && !readOnly(session) && noLoading ? html`<p class="note">${noLoading}</p>` : null}
    ${row?.loaded ? html`<${Figures} row=${row} />` : null}
    <${Tabs} label="About the model" tabs=${TABS} current=${tab} onChoose=${(id) => replaceQuery({ tab: id === "versions" ? "" : id })} />
    ${!data && error ? html`<p class="note">${error.message}</p>` : null}
    ${tab === "versions" ? html`<${Versions} name=${name} path=${path} row=${row} data=${data} session=${session} />` : null}
    ${tab === "configuration" && data ? html`<${Configuration} data=${data} />` : null}
    ${tab === "statistics" && data ? html`<${Statistics} statistics=${data.statistics} />` : null}
    ${tab === "history" && data ? html`<${History} name=${name} path=${path} history=${data.history} denied=${data.denied?.history} session=${session} />` : null}
  `;
}

function LoadActions({ name, path, row, session, reason }) {
  const run = (verb, done) => async () => {
    await act("POST", `${path}/${verb}`);
    refresh("/api/models", { withParts: true });
    return done;
  };
  if (!row?.loaded) return html`<${Action} label="Load" title="Loads the model on the workers" session=${session} reason=${reason} run=${run("load", `Model ${name} is loaded`)} />`;
  return html`
    <${Action} label="Reload" title="Reads the model's files again and loads what has changed; requests are served meanwhile" session=${session} reason=${reason} run=${run("reload", `Model ${name} is loaded again`)} />
    <${Action}
      label="Unload"
      tone="danger"
      title="Unloads all versions of the model after the requests in flight"
      session=${session}
      reason=${reason}
      confirm=${{ title: `Unload ${name}?`, text: "Requests in flight are finished. After that, requests to the model are rejected until it is loaded again." }}
      run=${run("unload", `Model ${name} is unloaded`)}
    />
  `;
}

function Figures({ row }) {
  return html`<div class="figures">
    <${Figure} label="Requests" value=${number(row.requests_per_s)} unit="/s" />
    <${Figure} label="Failures" value=${number(row.failures_per_s)} unit="/s" tone=${row.failures_per_s > 0 ? "bad" : ""} />
    <${Figure} label="Median" value=${milliseconds(row.p50_ms)} />
    <${Figure} label="p99" value=${milliseconds(row.p99_ms)} />
    <${Figure} label="Waiting" value=${number(row.queue_depth)} />
    <${Figure} label="Batch" value=${number(row.batch_size)} />
    <${Figure} label="Busy" value=${percent(row.utilization)} />
    <${Figure} label="Workers" value=${number(row.workers)} />
  </div>`;
}

function Versions({ name, path, row, data, session }) {
  const versions = row?.versions ?? [];
  return html`
    <${PlainTable} label="Versions">
      <thead><tr><th>Version</th><th>State</th><th class="number">Share</th><th class="number">Instances</th><th class="number">Busy</th></tr></thead>
      <tbody>
        ${versions.map(
          (version) => html`<tr key=${version.version}>
            <td>${version.version}</td>
            <td><${State} tone=${toneOf(version.state)}>${version.state.toLowerCase()}</${State}></td>
            <td class="number">${version.share === null ? "" : percent(version.share)}</td>
            <td class="number">${grouped(version.instances)}</td>
            <td class="number">${grouped(version.busy)}</td>
          </tr>`,
        )}
        ${versions.length ? null : html`<tr><td colspan="5" class="note">No version is loaded.</td></tr>`}
      </tbody>
    </${PlainTable}>
    ${versions.length > 1 && data?.traffic ? html`<${Traffic} name=${name} path=${path} versions=${versions} traffic=${data.traffic} session=${session} />` : null}
    ${versions.length > 1 && data && !data.traffic ? html`<p class="note">How the requests are split is unknown: a gateway has the rule.</p>` : null}
    ${row?.loaded ? html`<${ModelCharts} model=${row.id} />` : null}
  `;
}

function Configuration({ data }) {
  const completed = new Set(data.completed ?? []);
  const lines = useMemo(() => described(data.config, completed), [data.config, data.completed]);
  return html`
    ${completed.size ? html`<p class="note"><span class="completed-key"></span> ${count(completed.size, "field")} that config.pbtxt does not have, and that Weir completed</p>` : null}
    <div class="code">
      <pre tabindex="0" class="configuration">${lines.map((line, place) => html`<span key=${place} class=${line.isCompleted ? "completed" : ""}>${line.text}${"\n"}</span>`)}</pre>
    </div>
  `;
}

/** The lines of a configuration as JSON; `isCompleted` where the path of a field, or of one around it, is in `completed`. */
export function described(config, completed) {
  const lines = [];
  const isIn = (path) => completed.has(path) || completed.has(path.replace(/\[\d+\]/g, "[]")) || completed.has(path.replace(/\[(\d+)\]/g, ".$1"));
  function add(value, path, indent, lead, tail, isCompleted) {
    const space = "  ".repeat(indent);
    if (value !== null && typeof value === "object" && Object.keys(value).length && !(Array.isArray(value) && value.every((one) => typeof one !== "object"))) {
      const isList = Array.isArray(value);
      lines.push({ text: `${space}${lead}${isList ? "[" : "{"}`, isCompleted });
      const entries = Object.entries(value);
      entries.forEach(([key, inner], place) => {
        const innerPath = isList ? `${path}[${key}]` : path ? `${path}.${key}` : key;
        add(inner, innerPath, indent + 1, isList ? "" : `${JSON.stringify(key)}: `, place < entries.length - 1 ? "," : "", isCompleted || isIn(innerPath));
      });
      lines.push({ text: `${space}${isList ? "]" : "}"}${tail}`, isCompleted });
    } else {
      lines.push({ text: `${space}${lead}${JSON.stringify(value)}${tail}`, isCompleted });
    }
  }
  add(config ?? {}, "", 0, "", "", false);
  return lines;
}

const STATISTICS = [
  ["success", "Succeeded"],
  ["fail", "Failed"],
  ["queue", "Queue"],
  ["compute_input", "Input"],
  ["compute_infer", "Compute"],
  ["compute_output", "Output"],
  ["cache_hit", "Cache hit"],
  ["cache_miss", "Cache miss"],
];

function Statistics({ statistics }) {
  const rows = Array.isArray(statistics) ? statistics : (statistics?.model_stats ?? []);
  if (!rows.length) return html`<p class="note">No request has been counted.</p>`;
  return rows.map(
    (row) => html`<section key=${row.version} class="statistics">
      <h2 class="small-head">Version ${row.version}</h2>
      <p class="note">${count(Number(row.inference_count ?? 0), "inference")} in ${count(Number(row.execution_count ?? 0), "execution")}; the last ${row.last_inference ? moment(Number(row.last_inference)) : "never"}</p>
      <${PlainTable} label="Time of version ${row.version}">
        <thead><tr><th>What</th><th class="number">Count</th><th class="number">In all</th><th class="number">Each</th></tr></thead>
        <tbody>
          ${STATISTICS.filter(([key]) => Number(row.inference_stats?.[key]?.count ?? 0)).map(([key, title]) => {
            const entry = row.inference_stats[key];
            const total = Number(entry.ns) / 1000;
            return html`<tr key=${key}><td>${title}</td><td class="number">${grouped(Number(entry.count))}</td><td class="number">${microseconds(total)}</td><td class="number">${microseconds(total / Number(entry.count))}</td></tr>`;
          })}
        </tbody>
      </${PlainTable}>
      ${row.batch_stats?.length ? html`<${BatchStatistics} batches=${row.batch_stats} />` : null}
    </section>`,
  );
}

function BatchStatistics({ batches }) {
  return html`<${PlainTable} label="Batch sizes">
    <thead><tr><th>Batch size</th><th class="number">Executions</th><th class="number">Compute each</th></tr></thead>
    <tbody>
      ${batches.map((batch) => {
        const executions = Number(batch.compute_infer?.count ?? 0);
        return html`<tr key=${batch.batch_size}><td>${batch.batch_size}</td><td class="number">${grouped(executions)}</td><td class="number">${executions ? microseconds(Number(batch.compute_infer.ns) / 1000 / executions) : "–"}</td></tr>`;
      })}
    </tbody>
  </${PlainTable}>`;
}

function History({ name, path, history, denied, session }) {
  if (denied) return html`<p class="note">You may not see the history: ${denied}.</p>`;
  if (!history) return html`<p class="note">The history is unknown: a gateway has it.</p>`;
  const rows = history.changes ?? [];
  if (!rows.length) return html`<p class="note">The model has not been changed since the server keeps its history.</p>`;
  return html`<p class="buttons"><${RollBack} name=${name} path=${path} session=${session} /></p>
  <${PlainTable} label="Changes">
    <thead><tr><th>When</th><th>What</th><th>By</th><th>Before → after</th></tr></thead>
    <tbody>
      ${rows.map(
        (change) => html`<tr key=${change.number}>
          <td>${moment(change.at_ms)}</td>
          <td>${change.kind}${change.undoes ? ` (undoes change ${change.undoes})` : ""}</td>
          <td>${change.by ?? ""}</td>
          <td>${change.error ? html`<${Reason} text=${change.error} />` : changeText(change)}${change.note ? html` <small>${change.note}</small>` : null}</td>
        </tr>`,
      )}
    </tbody>
  </${PlainTable}>`;
}

function RollBack({ name, path, session }) {
  async function run() {
    const { undone, now } = await act("POST", `${path}/rollback`);
    refresh("/api/models", { withParts: true });
    return `Undone: ${undone.kind} of ${moment(undone.at_ms)}. Now: ${now?.traffic ? weightsText(now.traffic) : loadText(now?.load)}`;
  }
  return html`<${Action}
    label="Roll back"
    title="Undoes the last change of the model that succeeded and was not undone"
    session=${session}
    confirm=${{ title: `Roll back ${name}?`, text: "The last change that succeeded and was not undone is undone: the traffic rule before it is set again, or the model is loaded or unloaded as it was. A ramp with all its steps is one change." }}
    run=${run}
  />`;
}

function changeText(change) {
  if (change.traffic_before || change.traffic_after) return `${weightsText(change.traffic_before)} → ${weightsText(change.traffic_after)}`;
  return `${loadText(change.load_before)} → ${loadText(change.load_after)}`;
}

function weightsText(state) {
  const weights = Object.entries(state?.weights ?? {});
  return weights.length ? weights.map(([version, weight]) => `${version}=${weight}`).join(" ") : "no rule";
}

function loadText(state) {
  return state?.load ? `loaded${state.config ? " with another configuration" : ""}` : "not loaded";
}
