// Questions before actions, and short reports after them.

import { html, render, useEffect, useLayoutEffect, useRef, useState } from "../core/html.js";

/** A modal dialog with `children`; Escape and the backdrop close it. */
export function Dialog({ title, onClose, children, className = "" }) {
  const element = useRef(null);
  // Before the next key is handled: what is typed goes into the dialog.
  useLayoutEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    return () => before?.focus?.();
  }, []);
  const onClick = (event) => event.target === element.current && onClose();
  return html`<dialog class=${className} ref=${element} onClose=${onClose} onClick=${onClick} aria-label=${title}>
    <div class="dialog-body">
      <h2>${title}</h2>
      ${children}
    </div>
  </dialog>`;
}

/** Asks whether to do something: resolves to true or false. `text` says what will happen; `verb` is on the button. */
export function confirmed(title, text, verb, { isDangerous = true } = {}) {
  return new Promise((resolve) => {
    const place = document.body.appendChild(document.createElement("div"));
    const close = (answer) => {
      render(null, place);
      place.remove();
      resolve(answer);
    };
    render(
      html`<${Dialog} title=${title} onClose=${() => close(false)}>
        <p>${text}</p>
        <div class="dialog-buttons">
          <button type="button" onClick=${() => close(false)}>Keep</button>
          <button type="button" class=${isDangerous ? "danger" : "primary"} autofocus onClick=${() => close(true)}>${verb}</button>
        </div>
      </${Dialog}>`,
      place,
    );
  });
}

const SHOWN_MS = 6000;
const reports = { shown: [], listeners: new Set(), number: 0 };

/** Shows a report for some seconds; one of an error stays until it is closed. */
export function report(text, tone = "good") {
  const entry = { id: (reports.number += 1), text, tone };
  reports.shown = [...reports.shown.slice(-3), entry];
  for (const listener of reports.listeners) listener();
  if (tone !== "bad") setTimeout(() => closeReport(entry.id), SHOWN_MS);
}

function closeReport(id) {
  reports.shown = reports.shown.filter((entry) => entry.id !== id);
  for (const listener of reports.listeners) listener();
}

/** The reports that are shown now. */
export function Reports() {
  const [, redraw] = useState(0);
  useEffect(() => {
    const listener = () => redraw((count) => count + 1);
    reports.listeners.add(listener);
    return () => reports.listeners.delete(listener);
  }, []);
  return html`<div class="reports" role="status" aria-live="polite">
    ${reports.shown.map(
      (entry) => html`<div key=${entry.id} class="report ${entry.tone}">
        <span>${entry.text}</span><button type="button" class="plain" aria-label="Close" onClick=${() => closeReport(entry.id)}>×</button>
      </div>`,
    )}
  </div>`;
}
