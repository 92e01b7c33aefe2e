// One model: its versions and their shares of the traffic, load and unload, configuration, statistics, history.

import { act, segment } from "../core/api.js";
import { count, grouped, microseconds, milliseconds, moment, number, percent } from "../core/format.js";
import { html, useEffect, useMemo, useState } from "../core/html.js";
import { refresh, usePoll } from "../core/polling.js";
import { link, replaceQuery } from "../core/router.js";
import { Action, Code, Figure, READ_ONLY, ReadOnlyNote, State, Tabs, Waiting } from "../components/controls.js";
import { ModelCharts } from "./charts.js";
import { toneOf } from "./models.js";

const TABS = [
  ["versions", "Versions"],
  ["configuration", "Configuration"],
  ["statistics", "Statistics"],
  ["history", "History"],
];

export function Model({ id, route, session }) {
  const path = `/api/models/${segment(id)}`;
  const { data, error } = usePoll(path, 2000);
  const index = usePoll("/api/models", 1000);
  const row = index.data?.models.find((model) => model.id === id);
  const name = row?.name ?? data?.name ?? id;
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
        <${LoadActions} name=${name} path=${path} row=${row} session=${session} />
      </div>
    </header>
    ${row?.namespace ? html`<p class="note">Namespace ${row.namespace}</p>` : null}
    ${row?.reason ? html`<p class=${row.state === "READY" ? "note" : "failure"}>${row.reason}</p>` : null}
    <${ReadOnlyNote} session=${session} />
    ${row?.loaded ? html`<${Figures} row=${row} />` : null}
    <${Tabs} label="About the model" tabs=${TABS} current=${tab} onChoose=${(id) => replaceQuery({ tab: id === "versions" ? "" : id })} />
    ${!data && error ? html`<p class="note">${error.message}</p>` : null}
    ${tab === "versions" ? html`<${Versions} name=${name} path=${path} row=${row} data=${data} session=${session} />` : null}
    ${tab === "configuration" && data ? html`<${Configuration} data=${data} />` : null}
    ${tab === "statistics" && data ? html`<${Statistics} statistics=${data.statistics} />` : null}
    ${tab === "history" && data ? html`<${History} history=${data.history} />` : null}
  `;
}

function LoadActions({ name, path, row, session }) {
  const run = (verb, done) => async () => {
    await act("POST", `${path}/${verb}`);
    refresh("/api/models", { withParts: true });
    return done;
  };
  if (!row?.loaded) return html`<${Action} label="Load" title="Loads the model on the workers" session=${session} run=${run("load", `Model ${name} is loaded`)} />`;
  return html`
    <${Action} label="Reload" title="Reads the model's files again and loads what has changed; requests are served meanwhile" session=${session} run=${run("reload", `Model ${name} is loaded again`)} />
    <${Action}
      label="Unload"
      tone="danger"
      title="Unloads all versions of the model after the requests in flight"
      session=${session}
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
    <table class="plain-table">
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
    </table>
    ${versions.length > 1 ? html`<${Traffic} name=${name} path=${path} versions=${versions} traffic=${data?.traffic} session=${session} />` : null}
    ${row?.loaded ? html`<${ModelCharts} model=${row.id} />` : null}
  `;
}

/** The weights of a traffic rule by version; `{}` without a rule. */
function weightsOf(traffic) {
  return traffic?.weights ?? {};
}

function Traffic({ name, path, versions, traffic, session }) {
  const stored = weightsOf(traffic);
  const key = JSON.stringify(stored);
  const initial = useMemo(() => {
    const newest = Math.max(...versions.map((version) => version.version));
    const total = Object.values(stored).reduce((sum, weight) => sum + weight, 0);
    return Object.fromEntries(versions.map(({ version }) => [version, total ? Math.round(((stored[version] ?? 0) / total) * 100) : version === newest ? 100 : 0]));
  }, [key, versions.map((version) => version.version).join()]);
  const [shares, setShares] = useState(initial);
  const [isChanged, setChanged] = useState(false);
  useEffect(() => {
    setShares(initial);
    setChanged(false);
  }, [initial]);
  const isReadOnly = session && !session.allow_changes;
  function slide(version, value) {
    setShares(balanced(shares, String(version), value));
    setChanged(true);
  }
  const text = versions.map(({ version }) => `${version}=${shares[version]}`).join(" ");
  const hasRule = traffic?.source === "set";
  return html`<section class="traffic" aria-label="Traffic">
    <h3>Share of the requests that name no version</h3>
    ${versions.map(
      ({ version }) => html`<div class="slider" key=${version}>
        <label for="share-${version}">Version ${version}</label>
        <input id="share-${version}" type="range" min="0" max="100" step="1" value=${shares[version]} disabled=${isReadOnly} title=${isReadOnly ? READ_ONLY : ""} onInput=${(event) => slide(version, Number(event.target.value))} />
        <output for="share-${version}">${shares[version]} %</output>
      </div>`,
    )}
    <p class="buttons">
      <${Action}
        label="Set shares"
        tone="primary"
        title="Sets ${text} for requests that name no version, in all gateways at once"
        session=${session}
        reason=${isChanged ? "" : "The shares are as they are set now."}
        run=${async () => {
          await act("PUT", `${path}/traffic`, { weights: Object.fromEntries(versions.filter(({ version }) => shares[version] > 0).map(({ version }) => [version, shares[version]])) });
          refresh("/api/models", { withParts: true });
          return `Traffic of ${name} is split ${text}`;
        }}
      />
      <${Action}
        label="Remove the rule"
        title="Removes the rule: the model's configuration applies again, or the latest version gets all requests"
        session=${session}
        reason=${hasRule ? "" : "There is no rule."}
        run=${async () => {
          await act("DELETE", `${path}/traffic`);
          refresh("/api/models", { withParts: true });
          return `The traffic rule of ${name} is removed`;
        }}
      />
      <span class="note">${ruleText(traffic)}</span>
    </p>
  </section>`;
}

function ruleText(traffic) {
  const weights = Object.entries(weightsOf(traffic)).map(([version, weight]) => `${version}=${weight}`);
  if (!weights.length) return "No rule: the latest version gets all.";
  const sticky = traffic.sticky ? `, by ${traffic.sticky}` : "";
  return `${traffic.source === "config" ? "Rule of the model's configuration" : "Rule"}: ${weights.join(" ")}${sticky}`;
}

/** Shares in percent after that of `version` was set to `value`: the others change in proportion, and the sum is 100. */
export function balanced(shares, version, value) {
  const others = Object.keys(shares).filter((name) => name !== version);
  if (!others.length) return { [version]: 100 };
  const rest = 100 - value;
  const total = others.reduce((sum, name) => sum + shares[name], 0);
  const next = { ...shares, [version]: value };
  let left = rest;
  others.forEach((name, place) => {
    const share = place === others.length - 1 ? left : Math.min(left, Math.round(total ? (shares[name] / total) * rest : rest / others.length));
    next[name] = share;
    left -= share;
  });
  return next;
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
      <h3>Version ${row.version}</h3>
      <p class="note">${count(Number(row.inference_count ?? 0), "inference")} in ${count(Number(row.execution_count ?? 0), "execution")}; the last ${row.last_inference ? moment(Number(row.last_inference)) : "never"}</p>
      <table class="plain-table">
        <thead><tr><th>What</th><th class="number">Count</th><th class="number">In all</th><th class="number">Each</th></tr></thead>
        <tbody>
          ${STATISTICS.filter(([key]) => Number(row.inference_stats?.[key]?.count ?? 0)).map(([key, title]) => {
            const entry = row.inference_stats[key];
            const total = Number(entry.ns) / 1000;
            return html`<tr key=${key}><td>${title}</td><td class="number">${grouped(Number(entry.count))}</td><td class="number">${microseconds(total)}</td><td class="number">${microseconds(total / Number(entry.count))}</td></tr>`;
          })}
        </tbody>
      </table>
      ${row.batch_stats?.length ? html`<${BatchStatistics} batches=${row.batch_stats} />` : null}
    </section>`,
  );
}

function BatchStatistics({ batches }) {
  return html`<table class="plain-table">
    <thead><tr><th>Batch size</th><th class="number">Executions</th><th class="number">Compute each</th></tr></thead>
    <tbody>
      ${batches.map((batch) => {
        const executions = Number(batch.compute_infer?.count ?? 0);
        return html`<tr key=${batch.batch_size}><td>${batch.batch_size}</td><td class="number">${grouped(executions)}</td><td class="number">${executions ? microseconds(Number(batch.compute_infer.ns) / 1000 / executions) : "–"}</td></tr>`;
      })}
    </tbody>
  </table>`;
}

function History({ history }) {
  const rows = history?.changes ?? history ?? [];
  if (!rows.length) return html`<p class="note">The model has not been changed since the server keeps its history.</p>`;
  return html`<table class="plain-table">
    <thead><tr><th>When</th><th>What</th><th>By</th><th>Before → after</th></tr></thead>
    <tbody>
      ${rows.map(
        (change) => html`<tr key=${change.number}>
          <td>${moment(change.at_ms)}</td>
          <td>${change.kind}${change.undoes ? ` (undoes change ${change.undoes})` : ""}</td>
          <td>${change.by ?? ""}</td>
          <td>${change.error ? html`<span class="failure">${change.error}</span>` : changeText(change)}${change.note ? html` <small>${change.note}</small>` : null}</td>
        </tr>`,
      )}
    </tbody>
  </table>`;
}

function changeText(change) {
  const weights = (state) => (Object.keys(state?.weights ?? {}).length ? Object.entries(state.weights).map(([version, weight]) => `${version}=${weight}`).join(" ") : "no rule");
  if (change.traffic_before || change.traffic_after) return `${weights(change.traffic_before)} → ${weights(change.traffic_after)}`;
  const load = (state) => (state?.load ? `loaded${state.config ? " with another configuration" : ""}` : "not loaded");
  return `${load(change.load_before)} → ${load(change.load_after)}`;
}
