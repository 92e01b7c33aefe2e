// The shell: navigation, the state of the cluster and of the connection, keys, and the view of the current route.

import { get, useConnection } from "./core/api.js";
import { clock, count, sentence } from "./core/format.js";
import { html, render, useEffect, useErrorBoundary, useRef, useState } from "./core/html.js";
import { useKeys } from "./core/keys.js";
import { usePoll } from "./core/polling.js";
import { link, useRoute } from "./core/router.js";
import { readOnly } from "./components/controls.js";
import { Reports } from "./components/dialog.js";
import { Finder, KeyHelp } from "./components/finder.js";
import { Batching } from "./views/batching.js";
import { DeadLetters } from "./views/dead_letters.js";
import { Jobs } from "./views/jobs.js";
import { Model } from "./views/model.js";
import { Models } from "./views/models.js";
import { Overview } from "./views/overview.js";
import { hasFinding, warningsOf } from "./views/problems.js";
import { Requests } from "./views/requests.js";
import { Topology } from "./views/topology.js";
import { TryIt } from "./views/try_it.js";

/** The views: the first segment of the route, its name, its key after `g`, and its component. */
export const VIEWS = [
  { id: "overview", name: "Overview", key: "o", view: Overview },
  { id: "topology", name: "Topology", key: "t", view: Topology },
  { id: "models", name: "Models", key: "m", view: ({ route, ...rest }) => (route.path[1] ? html`<${Model} key=${route.path[1]} id=${route.path[1]} route=${route} ...${rest} />` : html`<${Models} route=${route} ...${rest} />`) },
  { id: "try", name: "Try it", key: "i", view: TryIt },
  { id: "batching", name: "Batching", key: "b", view: Batching },
  { id: "requests", name: "Requests", key: "r", view: Requests },
  { id: "jobs", name: "Jobs", key: "j", view: Jobs },
  { id: "dead", name: "Dead letters", key: "d", view: DeadLetters },
];

const STATUS_MS = 2000;

function Console() {
  const route = useRoute();
  const [session, setSession] = useState(null);
  const [isHelpOpen, setHelpOpen] = useState(false);
  const [isFinderOpen, setFinderOpen] = useState(false);
  const status = usePoll("/api/status", STATUS_MS);
  const lost = useConnection().lostMs;
  useEffect(() => {
    if (lost !== null && session) return;
    get("/api/session").then(setSession, () => {});
  }, [lost, status.atMs === 0]);
  useKeys(VIEWS, { openHelp: () => setHelpOpen(true), openFinder: () => setFinderOpen(true) });
  const current = VIEWS.find((view) => view.id === (route.path[0] ?? "overview"));
  useEffect(() => {
    const subject = current?.id === "models" && route.path[1] ? route.path[1] : (current?.name ?? "Not found");
    document.title = `${subject} · Weir`;
  }, [current, route.path[1]]);
  const isBrokerLost = status.data?.state === "unreachable";
  return html`
    <a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), document.getElementById("main").focus())}>Skip to the content</a>
    <${Navigation} current=${current?.id} status=${status.data} session=${session} onHelp=${() => setHelpOpen(true)} onFind=${() => setFinderOpen(true)} />
    <main id="main" tabindex="-1" class=${lost !== null || isBrokerLost ? "stale" : ""}>
      <${ConnectionBanner} brokerError=${isBrokerLost ? status.data.error : ""} status=${status.data} />
      ${current ? html`<${Guarded} key=${current.id}><${current.view} route=${route} session=${session} status=${status} /></${Guarded}>` : html`<h1>There is no view ${route.path[0]}</h1><p><a href=${link(["overview"])}>Overview</a></p>`}
    </main>
    <${Reports} />
    ${isHelpOpen ? html`<${KeyHelp} views=${VIEWS} onClose=${() => setHelpOpen(false)} />` : null}
    ${isFinderOpen ? html`<${Finder} views=${VIEWS} status=${status.data} onClose=${() => setFinderOpen(false)} />` : null}
  `;
}

/** Shows why a view failed, and lets the others work. */
function Guarded({ children }) {
  const [error, reset] = useErrorBoundary((failure) => console.error(failure));
  if (!error) return children;
  return html`<p class="failure" role="alert">This view failed: ${String(error.message ?? error)}</p><button type="button" onClick=${reset}>Draw it again</button>`;
}

function Navigation({ current, status, session, onHelp, onFind }) {
  const problems = warningsOf(status).length;
  const dead = status?.dead?.reduce((total, row) => total + row.letters, 0) ?? 0;
  const badges = { topology: problems, dead };
  const list = useRef(null);
  // On narrow screens the views are in a row that scrolls.
  useEffect(() => list.current.querySelector('[aria-current="page"]')?.scrollIntoView({ block: "nearest", inline: "center" }), [current]);
  return html`<nav aria-label="Views">
    <a class="brand" href=${link(["overview"])} aria-label="Weir: overview"><img src="/web/weir.svg" alt="" width="26" height="26" /><b>Weir</b></a>
    <ul ref=${list}>
      ${VIEWS.map(
        (view) => html`<li key=${view.id}>
          <a href=${link([view.id])} aria-current=${view.id === current ? "page" : null} title="${view.name} (g ${view.key})">
            <span>${view.name}</span>
            ${badges[view.id] ? html`<em class=${view.id === "topology" ? "warn" : ""} title=${count(badges[view.id], view.id === "topology" ? "warning" : "dead letter")}>${badges[view.id]}</em>` : null}
          </a>
        </li>`,
      )}
    </ul>
    <div class="nav-foot">
      <button type="button" class="plain find" onClick=${onFind} title="Find a model, a process or a view (/)">Find<kbd>/</kbd></button>
      <${ThemeSwitch} />
      <button type="button" class="plain" onClick=${onHelp} title="Keys (?)">Keys<kbd>?</kbd></button>
      <p class="about">
        ${session ? html`${session.release ? `Weir ${session.release}` : "Weir, from a checkout"}<br />${status?.broker ? `NATS ${status.broker.version}` : "NATS"}<br />${readOnly(session) ? "Read-only" : "Changes allowed"}` : "…"}
      </p>
    </div>
  </nav>`;
}

function ThemeSwitch() {
  const [choice, setChoice] = useState(window.weirTheme.choice);
  const next = { auto: "light", light: "dark", dark: "auto" }[choice];
  const name = { auto: "as the system", light: "light", dark: "dark" };
  function choose() {
    window.weirTheme.choose(next);
    setChoice(next);
  }
  return html`<button type="button" class="plain" onClick=${choose} title="Colours: ${name[choice]}. Change to ${name[next]}." aria-label="Colours ${choice}: ${name[choice]}. Change to ${name[next]}.">
    Colours <span class="choice">${choice}</span>
  </button>`;
}

function ConnectionBanner({ brokerError, status }) {
  const { lostMs, nextTryMs } = useConnection();
  const [, redraw] = useState(0);
  useEffect(() => {
    if (lostMs === null) return undefined;
    const timer = setInterval(() => redraw((number) => number + 1), 1000);
    return () => clearInterval(timer);
  }, [lostMs]);
  if (lostMs !== null) {
    const wait = nextTryMs ? Math.max(0, Math.ceil((nextTryMs - Date.now()) / 1000)) : 0;
    return html`<p class="banner bad" role="alert">
      The console's server has not replied since ${clock(lostMs)}. What you see is from before; ${wait ? `next try in ${wait} s` : "trying again"}.
    </p>`;
  }
  if (brokerError) return html`<p class="banner bad" role="alert">The console can't reach the NATS server: ${brokerError}. What you see is from before; it tries again by itself.</p>`;
  const down = warningsOf(status).filter((finding) => finding.level === "down");
  if (!down.length) return null;
  const unknown = hasFinding(status, "no gateway") ? " Rates and latencies are unknown, and no request can be sent from here, until one replies." : "";
  return html`<p class="banner bad" role="alert">${down.map((finding) => sentence(finding.text)).join(" ")}${unknown}</p>`;
}

render(html`<${Console} />`, document.getElementById("app"));
