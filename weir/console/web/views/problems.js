// Problems of the cluster, as `weir status` finds them, each with what to do.

import { sentence } from "../core/format.js";
import { html } from "../core/html.js";

/** The problems of a status, warnings first. */
export function sortedProblems(status) {
  return [...(status?.problems ?? [])].sort((a, b) => Number(a.level !== "warning") - Number(b.level !== "warning"));
}

/** A list of them. */
export function Problems({ problems }) {
  if (!problems.length) return html`<p class="note">No problems.</p>`;
  return html`<ul class="problems">
    ${problems.map(
      (problem) => html`<li key=${problem.kind + problem.about + problem.text} class="problem ${problem.level}">
        <b>${sentence(problem.text)}</b>
        ${problem.advice ? html`<span>${sentence(problem.advice)}</span>` : null}
      </li>`,
    )}
  </ul>`;
}
