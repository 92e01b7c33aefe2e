// Topology: hosts, processes, who owns which queue, which worker serves what, and the problems.

import { bytes, count, grouped, moment, number, percent, seconds, shortId } from "../core/format.js";
import { html, useMemo, useState } from "../core/html.js";
import { link, replaceQuery } from "../core/router.js";
import { Reason, State, Tabs, Waiting } from "../components/controls.js";
import { cells, numeric, Table } from "../components/table.js";
import { Problems } from "./problems.js";
import { TopologyPicture } from "./topology_picture.js";

export const TONES = { up: "good", draining: "warn", leaving: "warn", silent: "bad" };

const MEANINGS = {
  up: "replies",
  draining: "accepts no new work",
  leaving: "finishes its work and exits",
  silent: "does not reply: dead, suspended or disconnected",
};

export function Topology({ route, status }) {
  const [tab, setTab] = useState("processes");
  const { data } = status;
  if (!data) return html`<h1>Topology</h1><${Waiting} error=${status.error} what="the state of the cluster" />`;
  const chosen = data.roles.find((role) => role.id === route.query.process);
  const choose = (id) => replaceQuery({ process: id === route.query.process ? "" : id });
  return html`
    <header class="view-head">
      <h1>Topology</h1>
      <p class="note">${count(data.hosts.length, "host")}, ${count(data.roles.length, "process", "processes")}, ${count(data.queues.length, "queue")}${data.broker ? `, NATS ${data.broker.version} at ${data.broker.url}` : ""}</p>
    </header>
    <${Problems} findings=${data.findings} />
    <div class="topology">
      <${TopologyPicture} status=${data} chosen=${chosen?.id} onChoose=${choose} />
      ${chosen ? html`<${Process} role=${chosen} status=${data} onClose=${() => choose(chosen.id)} />` : null}
    </div>
    <${Tabs} label="Tables" tabs=${[["processes", "Processes"], ["queues", "Queues"], ["streams", "Streams"]]} current=${tab} onChoose=${setTab} />
    ${tab === "processes" ? html`<${Processes} roles=${data.roles} chosen=${chosen?.id} onOpen=${choose} />` : null}
    ${tab === "queues" ? html`<${Queues} queues=${data.queues} />` : null}
    ${tab === "streams" ? html`<${Streams} broker=${data.broker} />` : null}
  `;
}

function Process({ role, status, onClose }) {
  const queues = status.queues.filter((queue) => queue.owner === role.id);
  const models = status.models.filter((model) => model.workers.includes(role.id));
  const facts = [
    ["Host", role.host_name || role.host],
    ["Process", role.pid],
    ["Started", role.since_ms ? moment(role.since_ms) : "unknown"],
    ["Release", role.release || "a checkout"],
    ["Event loop blocked", `${seconds(role.loop_lag_s)} at most`],
    ...role.urls.map((url) => ["Address", url]),
    ...(role.role === "worker" ? [["Instances", `${role.instances}, ${role.busy} busy (${percent(role.utilization)})`], ["Batches", role.batches]] : []),
  ];
  return html`<aside class="panel" aria-label="Process ${role.id}">
    <header><h2>${role.role}</h2><button type="button" class="plain" aria-label="Close" onClick=${onClose}>×</button></header>
    <p><code>${role.id}</code></p>
    <p><${State} tone=${TONES[role.state]}>${role.state}</${State}> ${MEANINGS[role.state]}</p>
    <dl class="facts">${facts.map(([name, value]) => html`<div key=${name + value}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${role.unreadable.map((reason) => html`<${Reason} key=${reason} text=${reason} />`)}
    ${queues.length ? html`<h3>Owns ${count(queues.length, "queue")}</h3><${Names} names=${queues.map((queue) => queue.model)} />` : null}
    ${models.length ? html`<h3>Serves ${count(models.length, "model")}</h3><${Names} names=${models.map((model) => model.name)} />` : null}
  </aside>`;
}

function Names({ names }) {
  return html`<ul class="names">${[...new Set(names)].map((name) => html`<li key=${name}><a href=${link(["models", name])}>${name}</a></li>`)}</ul>`;
}

function Processes({ roles, chosen, onOpen }) {
  const columns = useMemo(
    () => [
      { title: "Process", field: "id", formatter: cells.text(shortId, "mono"), widthGrow: 3, minWidth: 130, longest: 260 },
      { title: "Role", field: "role", minWidth: 90 },
      { title: "State", field: "state", formatter: cells.state((state) => TONES[state]), minWidth: 90 },
      { title: "Host", field: "host_name", formatter: cells.text((name, row) => name || row.host), responsive: 2 },
      numeric("Queues", "queues", grouped, { responsive: 3 }),
      numeric("Models", "models", grouped, { responsive: 3 }),
      numeric("Instances", "instances", grouped, { responsive: 2 }),
      { title: "Busy", field: "utilization", formatter: cells.share(percent), sorter: "number", responsive: 2 },
      numeric("Loop lag", "loop_lag_s", seconds, { responsive: 4 }),
      numeric("Started", "since_ms", moment, { responsive: 5, minWidth: 110 }),
    ],
    [],
  );
  return html`<${Table} label="Processes" columns=${columns} rows=${roles} rowKey="id" chosen=${chosen} onOpen=${(row) => onOpen(row.id)} maxHeight="420px" empty="No process replied" />`;
}

function Queues({ queues }) {
  const rows = useMemo(
    () =>
      queues.map((queue) => {
        const lanes = Object.values(queue.lanes);
        return {
          key: `${queue.namespace}/${queue.model}/${queue.partition}`,
          model: queue.model,
          partition: queue.partition,
          owner: queue.owner,
          claims: queue.claims.length,
          live: queue.lanes.live?.depth ?? null,
          event: queue.lanes.event?.depth ?? null,
          batch: queue.lanes.batch?.depth ?? null,
          oldest_s: lanes.length ? Math.max(...lanes.map((lane) => lane.oldest_s)) : null,
          frames: queue.frames,
        };
      }),
    [queues],
  );
  const columns = useMemo(
    () => [
      { title: "Model", field: "model", formatter: cells.link((row) => link(["models", row.model])), widthGrow: 2, minWidth: 120, longest: 300 },
      numeric("Partition", "partition", grouped, { responsive: 4 }),
      { title: "Owner", field: "owner", formatter: cells.state((owner, row) => (!owner ? "bad" : row.claims > 1 ? "warn" : "good"), (owner, row) => (!owner ? "no scheduler" : row.claims > 1 ? `${row.claims} claim it` : shortId(owner))), widthGrow: 2, minWidth: 120, longest: 260 },
      numeric("Live", "live", grouped),
      numeric("Event", "event", grouped, { responsive: 3 }),
      numeric("Batch", "batch", grouped, { responsive: 3 }),
      numeric("Oldest", "oldest_s", seconds),
      numeric("Unacknowledged", "frames", grouped, { responsive: 2 }),
    ],
    [],
  );
  return html`<${Table} label="Queues" columns=${columns} rows=${rows} rowKey="key" maxHeight="420px" empty="No queue" />`;
}

function Streams({ broker }) {
  const columns = useMemo(
    () => [
      { title: "Stream", field: "name", minWidth: 120, widthGrow: 2 },
      { title: "Storage", field: "storage", responsive: 3 },
      numeric("Messages", "messages", grouped),
      numeric("Size", "bytes", bytes),
      { title: "Filled", field: "filled", formatter: cells.share(percent, (value) => (value > 0.8 ? "warn" : "")), sorter: "number", responsive: 2 },
      numeric("Replicas", "replicas", number, { responsive: 3 }),
      { title: "Behind", field: "behind", formatter: cells.text((names) => names.join(", ") || "none"), responsive: 4 },
    ],
    [],
  );
  const rows = useMemo(() => (broker?.streams ?? []).map((stream) => ({ ...stream, filled: stream.max_bytes > 0 ? stream.bytes / stream.max_bytes : null })), [broker]);
  return html`<${Table} label="Streams" columns=${columns} rows=${rows} rowKey="name" maxHeight="420px" empty="The broker does not reply" />`;
}
