// `Finder` (key `/`): goes to a view, a model, a process or a request. `KeyHelp` (key `?`): the keys.

import { html, useMemo, useState } from "../core/html.js";
import { usePoll } from "../core/polling.js";
import { go } from "../core/router.js";
import { Dialog } from "./dialog.js";

const MAX_SHOWN = 12;
const NONE = [];

/** A dialog with one field; arrow keys and Enter choose among what fits the text. */
export function Finder({ views, status, onClose }) {
  const [text, setText] = useState("");
  const [at, setAt] = useState(0);
  const models = usePoll("/api/models", 5000).data?.models ?? NONE;
  const found = useMemo(() => matches(text.trim().toLowerCase(), views, models, status), [text, models, status]);
  const chosen = Math.min(at, found.length - 1);
  function open(entry) {
    onClose();
    go(entry.path, entry.query);
  }
  function onKeyDown(event) {
    if (event.key === "ArrowDown") setAt(Math.min(found.length - 1, chosen + 1));
    else if (event.key === "ArrowUp") setAt(Math.max(0, chosen - 1));
    else if (event.key === "Enter" && found[chosen]) open(found[chosen]);
    else return;
    event.preventDefault();
  }
  return html`<${Dialog} title="Find" onClose=${onClose} className="finder">
    <input
      autofocus
      type="search"
      role="combobox"
      aria-expanded="true"
      aria-controls="found"
      aria-activedescendant=${found[chosen] ? `found-${chosen}` : null}
      aria-label="Find a model, a process, a view or a request"
      placeholder="Model, process, view, or a request's id"
      value=${text}
      onInput=${(event) => (setText(event.target.value), setAt(0))}
      onKeyDown=${onKeyDown}
    />
    <ul id="found" role="listbox" aria-label="Found">
      ${found.map(
        (entry, place) => html`<li key=${entry.kind + entry.name} id="found-${place}" role="option" aria-selected=${String(place === chosen)} onClick=${() => open(entry)}>
          <span>${entry.name}</span><small>${entry.kind}</small>
        </li>`,
      )}
    </ul>
  </${Dialog}>`;
}

function matches(text, views, models, status) {
  const entries = [
    ...views.map((view) => ({ kind: "view", name: view.name, path: [view.id] })),
    ...models.map((model) => ({ kind: "model", name: model.id, path: ["models", model.id] })),
    ...(status?.roles ?? []).map((role) => ({ kind: role.role, name: role.id, path: ["topology"], query: { process: role.id } })),
  ];
  const fitting = entries.filter((entry) => entry.name.toLowerCase().includes(text));
  fitting.sort((a, b) => Number(b.name.toLowerCase().startsWith(text)) - Number(a.name.toLowerCase().startsWith(text)));
  const shown = fitting.slice(0, MAX_SHOWN);
  if (text) shown.push({ kind: "look up this id", name: `Request ${text}`, path: ["requests", text] });
  return shown;
}

/** The keys of the page. */
export function KeyHelp({ views, onClose }) {
  return html`<${Dialog} title="Keys" onClose=${onClose}>
    <dl class="keys">
      ${views.map((view) => html`<div key=${view.id}><dt><kbd>g</kbd> <kbd>${view.key}</kbd></dt><dd>${view.name}</dd></div>`)}
      <div><dt><kbd>/</kbd></dt><dd>Find a model, a process, a view or a request</dd></div>
      <div><dt><kbd>↑</kbd> <kbd>↓</kbd> <kbd>Enter</kbd></dt><dd>Choose and open a row of a table</dd></div>
      <div><dt><kbd>←</kbd> <kbd>→</kbd></dt><dd>The tab beside</dd></div>
      <div><dt><kbd>Esc</kbd></dt><dd>Close what is open</dd></div>
      <div><dt><kbd>?</kbd></dt><dd>These keys</dd></div>
    </dl>
    <p class="note">Drag over a chart to look at a part of its time.</p>
  </${Dialog}>`;
}
