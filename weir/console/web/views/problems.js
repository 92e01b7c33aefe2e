// Findings of `weir status`: problems, with alike ones in one line. Each leads to the page that helps, or says what to do.

import { count, sentence } from "../core/format.js";
import { html } from "../core/html.js";
import { link } from "../core/router.js";
import { Prose } from "../components/controls.js";

const toModel = { text: "Open the model", one: (name) => [["models", name]], all: { text: "List the models", target: [["models"]] } };
const toProcess = { text: "Look at the process", one: (id) => [["topology"], { process: id }], all: { text: "List the processes", target: [["topology"]] } };
const toBatches = { ...toModel, text: "Watch its batches", one: (name) => [["batching", name]] };
const toLetters = { text: "Look into them, replay or delete them", one: (name) => [["dead"], { model: name }], all: { text: "Look into them", target: [["dead"]] } };

/** The page that helps, by the kind of a problem: for one subject, and for several. `says` takes the place of the advice. */
const PAGES = {
  "silent process": toProcess,
  leaving: toProcess,
  "repository unreadable": toProcess,
  "model without worker": toModel,
  "model fails": { ...toModel, all: { text: "List those that fail", target: [["models"], { show: "failing" }] } },
  "change rejected": toModel,
  "split version not ready": { ...toModel, text: "Load the version, or change the shares", says: "" },
  overloaded: toBatches,
  "queue waits": toBatches,
  "dead letters": { ...toLetters, says: "" },
};

/** The findings that an operator should act on. */
export function warningsOf(status) {
  return (status?.findings ?? []).filter((finding) => finding.level !== "note");
}

/** Whether there is a finding of a kind. */
export function hasFinding(status, kind) {
  return (status?.findings ?? []).some((finding) => finding.kind === kind);
}

/** A list of findings. */
export function Problems({ findings }) {
  if (!findings.length) return html`<p class="note">No problems.</p>`;
  return html`<ul class="problems">${findings.map((finding) => html`<li key=${keyOf(finding)}><${Problem} finding=${finding} /></li>`)}</ul>`;
}

/** What distinguishes a finding in a list. */
export function keyOf(finding) {
  return `${finding.kind} ${finding.about.join(" ")} ${finding.level}`;
}

/** One finding: what it is, what to do, and each problem in it where there are several. */
export function Problem({ finding }) {
  const { kind, about, advice, level, text, texts } = finding;
  const [first, ...rest] = text.split("\n");
  const trace = rest.join("\n").trim();
  const page = PAGES[kind];
  const says = page?.says ?? advice ?? "";
  const way = !page || !about.length ? null : about.length === 1 ? { text: page.text, target: page.one(about[0]) } : page.all;
  return html`<div class="problem ${level}">
    <b>${sentence(first)}</b>
    ${trace ? html`<pre class="trace" tabindex="0">${trace}</pre>` : null}
    ${says || way ? html`<span>${says ? html`<${Prose} text=${sentence(says)} /> ` : null}${way ? html`<a href=${link(...way.target)}>${way.text}</a>` : null}</span>` : null}
    ${texts.length
      ? html`<details>
          <summary>${count(texts.length, "problem")}</summary>
          <ul>${texts.map((one) => html`<li key=${one}>${sentence(one)}</li>`)}</ul>
        </details>`
      : null}
  </div>`;
}
