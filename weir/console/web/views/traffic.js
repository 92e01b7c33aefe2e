// Traffic of a model: the shares of its versions, ramps, and copies of live requests.

import { act } from "../core/api.js";
import { number, seconds } from "../core/format.js";
import { html, useEffect, useMemo, useState } from "../core/html.js";
import { refresh } from "../core/polling.js";
import { Action, Field, readOnly, State } from "../components/controls.js";

/** The weights of a traffic rule by version; `{}` without a rule. */
function weightsOf(traffic) {
  return traffic?.weights ?? {};
}

/** The shares of the versions, and what else an operator does with them. `traffic` is what the gateway has of them. */
export function Traffic({ name, path, versions, traffic, session }) {
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
  const why = readOnly(session);
  function slide(version, value) {
    setShares(balanced(shares, String(version), value));
    setChanged(true);
  }
  const text = versions.map(({ version }) => `${version}=${shares[version]}`).join(" ");
  const hasRule = traffic?.source === "set";
  return html`<section class="traffic" aria-label="Traffic">
    <h2 class="small-head">Share of the requests that name no version</h2>
    ${versions.map(
      ({ version }) => html`<div class="slider" key=${version}>
        <label for="share-${version}">Version ${version}</label>
        <input id="share-${version}" type="range" min="0" max="100" step="1" value=${shares[version]} disabled=${Boolean(why)} title=${why} onInput=${(event) => slide(version, Number(event.target.value))} />
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
    <${Ramp} name=${name} path=${path} versions=${versions} traffic=${traffic} session=${session} />
    <${Shadow} name=${name} path=${path} versions=${versions} traffic=${traffic} session=${session} />
  </section>`;
}

const NO_RULE = "Set shares first: there is no rule.";
const RAMP_TONES = { running: "warn", done: "good" };

/** The version that a ramp or copies are most likely for: the newest. */
function newestOf(versions) {
  return Math.max(...versions.map((version) => version.version));
}

function VersionField({ versions, value, onChange }) {
  return html`<${Field} label="Version">${(id) => html`<select id=${id} value=${value} onChange=${(event) => onChange(Number(event.target.value))}>
    ${versions.map(({ version }) => html`<option key=${version} value=${version}>${version}</option>`)}
  </select>`}</${Field}>`;
}

function NumberField({ label, value, most, onChange }) {
  return html`<${Field} label=${label}>${(id) => html`<input id=${id} class="short" type="number" min="0" max=${most} step="any" value=${value} onInput=${(event) => onChange(event.target.value)} />`}</${Field}>`;
}

/** Raises the share of a version step by step; the servers do it, and go back by themselves. */
function Ramp({ name, path, versions, traffic, session }) {
  const [version, setVersion] = useState(newestOf(versions));
  const [goal, setGoal] = useState("100");
  const [minutes, setMinutes] = useState("30");
  const [condition, setCondition] = useState("error_rate>1% or p99>1.5x");
  const ramp = traffic?.ramp;
  const hasOther = Object.entries(weightsOf(traffic)).some(([one, weight]) => Number(one) !== version && weight > 0);
  const isGiven = Number(goal) > 0 && Number(goal) <= 100 && Number(minutes) > 0;
  const reason = !hasOther ? `Set shares first, in which another version than ${version} has some: a ramp goes back to them.` : isGiven ? "" : "Give a goal from 1 to 100 % and a time.";
  return html`<fieldset class="card">
    <legend>Ramp</legend>
    ${ramp ? html`<p><${State} tone=${RAMP_TONES[ramp.state] ?? "bad"}>${rampText(ramp)}</${State}></p>` : null}
    ${ramp?.reason ? html`<p class="note">${ramp.reason}</p>` : null}
    <div class="row">
      <${VersionField} versions=${versions} value=${version} onChange=${setVersion} />
      <${NumberField} label="Goal in percent" value=${goal} most="100" onChange=${setGoal} />
      <${NumberField} label="Time in minutes" value=${minutes} onChange=${setMinutes} />
      <${Field} label="Go back if">${(id) => html`<input id=${id} class="long" value=${condition} onInput=${(event) => setCondition(event.target.value)} />`}</${Field}>
    </div>
    <p class="buttons">
      <${Action}
        label="Start the ramp"
        title="Raises the share of version ${version} by steps to ${goal} %, and goes back by itself if it is worse than the condition"
        session=${session}
        reason=${reason}
        run=${async () => {
          await act("POST", `${path}/traffic/ramp`, { version, to: Number(goal), over_s: Number(minutes) * 60, abort_if: condition.trim() });
          refresh("/api/models", { withParts: true });
          return `The share of version ${version} of ${name} is being raised to ${goal} %`;
        }}
      />
      <span class="note">${reason || "Setting shares, or removing the rule, ends a ramp."}</span>
    </p>
  </fieldset>`;
}

function rampText(ramp) {
  const over = ramp.over_s ? ` over ${seconds(ramp.over_s)}` : "";
  return `Version ${ramp.version} to ${number(ramp.to)} %${over}: ${ramp.state}, step ${ramp.step} of ${ramp.steps}`;
}

/** Runs copies of live requests on a version. */
function Shadow({ name, path, versions, traffic, session }) {
  const shadow = traffic?.shadow;
  const [version, setVersion] = useState(newestOf(versions));
  const [share, setShare] = useState("20");
  const [compares, setCompares] = useState(true);
  const hasRule = Object.keys(weightsOf(traffic)).length > 0;
  const isGiven = Number(share) > 0 && Number(share) <= 100;
  const reason = !hasRule ? NO_RULE : isGiven ? "" : "Give a share from 1 to 100 %.";
  const send = (method, body, done) => async () => {
    await act(method, `${path}/traffic/shadow`, body);
    refresh("/api/models", { withParts: true });
    return done;
  };
  return html`<fieldset class="card">
    <legend>Copies of live requests</legend>
    ${shadow ? html`<p><${State} tone="good">${number(shadow.share)} % are copied to version ${shadow.version}${shadow.compare ? ", and the outputs are compared" : ""}</${State}></p>` : null}
    <div class="row">
      <${VersionField} versions=${versions} value=${version} onChange=${setVersion} />
      <${NumberField} label="Share in percent" value=${share} most="100" onChange=${setShare} />
      <label class="check"><input type="checkbox" checked=${compares} onChange=${(event) => setCompares(event.target.checked)} /> compare the outputs, and keep the requests that differ most</label>
    </div>
    <p class="buttons">
      <${Action}
        label="Run copies"
        title="Runs copies of ${share} % of the live requests on version ${version}; no caller waits for them"
        session=${session}
        reason=${reason}
        run=${send("PUT", { version, share: Number(share), compare: compares }, `Copies of ${share} % of the requests of ${name} run on version ${version}`)}
      />
      <${Action}
        label="Stop copies"
        title="Runs no more copies"
        session=${session}
        reason=${shadow ? "" : "No copies run."}
        run=${send("DELETE", undefined, `No copies of requests of ${name} run`)}
      />
      <span class="note">${reason || "Copies take the capacity that live requests leave."}</span>
    </p>
  </fieldset>`;
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
