// Small parts of views: actions, tabs, states, notes, code to copy.

import { UNKNOWN } from "../core/format.js";
import { html, useId, useRef, useState } from "../core/html.js";
import { confirmed, report } from "./dialog.js";

const READ_ONLY = "The console is read-only: start the server with --console-allow-changes to change things from here.";

/** Why nothing can be changed from here: "" where it can be, or is not known yet. */
export function readOnly(session) {
  if (!session) return "";
  if (!session.allow_changes) return READ_ONLY;
  return session.denied ? `You may not change things from here: ${session.denied}.` : "";
}

/**
 * A button that does something. `title` states what it will do. `confirm` is `{title, text}`, asked before. `run()` does it and
 * returns a report, or null; the text of an error is shown as the server sent it. `reason`: why it can't be used now.
 */
export function Action({ label, title, run, confirm = null, reason = "", tone = "", session = null }) {
  const [isRunning, setRunning] = useState(false);
  const why = readOnly(session) || reason;
  async function onClick() {
    if (why || isRunning) return;
    if (confirm && !(await confirmed(confirm.title, confirm.text, label))) return;
    setRunning(true);
    try {
      const done = await run();
      if (done) report(done);
    } catch (error) {
      report(error.message, "bad");
    } finally {
      setRunning(false);
    }
  }
  return html`<button type="button" class=${tone} aria-disabled=${why || isRunning ? "true" : null} title=${why || title} onClick=${onClick}>
    ${label}${isRunning ? "…" : ""}
  </button>`;
}

/** A note where the console is read-only. */
export function ReadOnlyNote({ session }) {
  const why = readOnly(session);
  return why ? html`<p class="note">${why}</p>` : null;
}

/** Tabs: `tabs` is `[[id, label]]`. Left and right move. */
export function Tabs({ tabs, current, onChoose, label }) {
  const list = useRef(null);
  function onKeyDown(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = tabs.findIndex(([id]) => id === current);
    const [next] = tabs[(at + step + tabs.length) % tabs.length];
    onChoose(next);
    list.current.querySelector(`[data-tab="${next}"]`)?.focus();
  }
  return html`<div class="tabs" role="tablist" aria-label=${label} ref=${list} onKeyDown=${onKeyDown}>
    ${tabs.map(
      ([id, text]) => html`<button
        key=${id}
        type="button"
        role="tab"
        data-tab=${id}
        aria-selected=${String(id === current)}
        tabindex=${id === current ? 0 : -1}
        onClick=${() => onChoose(id)}
      >${text}</button>`,
    )}
  </div>`;
}

/** A choice among few: buttons in a row. `choices` is `[[value, label]]`. */
export function Choices({ choices, current, onChoose, label }) {
  return html`<div class="choices" role="group" aria-label=${label}>
    ${choices.map(
      ([value, text]) => html`<button key=${value} type="button" aria-pressed=${String(value === current)} onClick=${() => onChoose(value)}>${text}</button>`,
    )}
  </div>`;
}

/** A state: a mark and a word. */
export function State({ tone, children }) {
  return html`<span class="state ${tone}">${children}</span>`;
}

/** A text in which `backticks` mark code. */
export function Prose({ text }) {
  return text.split("`").map((part, place) => (place % 2 ? html`<code key=${place}>${part}</code>` : part));
}

/** Why something failed. What follows the first line, as the traceback of a model, is preformatted. */
export function Reason({ text, className = "failure", isAlert = false }) {
  const [first, ...rest] = text.split("\n");
  const trace = rest.join("\n").trim();
  return html`<div class=${className} role=${isAlert ? "alert" : null}>
    ${first}${trace ? html`<pre class="trace" tabindex="0">${trace}</pre>` : null}
  </div>`;
}

/** A small table, which scrolls sideways where it is too wide. `label` names it. */
export function PlainTable({ label, children }) {
  return html`<div class="scroll" role="group" aria-label=${label} tabindex="0"><table class="plain-table">${children}</table></div>`;
}

/** A number with its name. */
export function Figure({ label, value, unit = "", tone = "", title = "" }) {
  return html`<div class="figure ${tone}" title=${title}>
    <span class="figure-label">${label}</span>
    <span class="figure-value">${value}${unit && value !== UNKNOWN ? html`<small>${unit}</small>` : null}</span>
  </div>`;
}

/** Text in monospace with a button that copies it. */
export function Code({ text, label = "Copy", className = "" }) {
  const [isCopied, setCopied] = useState(false);
  async function copy() {
    await copyText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  }
  return html`<div class="code ${className}">
    <button type="button" class="small" onClick=${copy}>${isCopied ? "Copied" : label}</button>
    <pre tabindex="0">${text}</pre>
  </div>`;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // No permission, or no secure origin: the old way.
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** A text field with its label. */
export function Field({ label, children, note = "" }) {
  const id = useId();
  return html`<div class="field">
    <label for=${id}>${label}</label>
    ${children(id)}
    ${note ? html`<small>${note}</small>` : null}
  </div>`;
}

/** What is shown until there is data: the reason if it failed. */
export function Waiting({ error, what = "data" }) {
  return error ? html`<${Reason} isAlert text=${error.message} />` : html`<p class="waiting">Waiting for ${what}…</p>`;
}
