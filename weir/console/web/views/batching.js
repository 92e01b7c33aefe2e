// Batching: a live picture of how the requests of one model enter batches, and a sentence that explains what is seen.

import { get } from "../core/api.js";
import { grouped, number, percent } from "../core/format.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../core/html.js";
import { usePoll, useTick } from "../core/polling.js";
import { go, link, parse, replace } from "../core/router.js";
import { Figure, Waiting } from "../components/controls.js";
import { Chart, useColours } from "../components/chart.js";
import { batchOption, instanceOption, sizeOption } from "../batching/pictures.js";
import { duration, explained, figuresOf } from "../batching/explain.js";

const TICK_MS = 500;
const KEPT = 600;
const RUNNING_MS = 5000;
const EXPLAINED_MS = 15_000;
const LANES_MS = 5000;
const COLUMN_PX = 14;

export function Batching({ route }) {
  const index = usePoll("/api/models", 5000);
  const names = (index.data?.models ?? []).filter((model) => model.loaded).map((model) => model.id).sort();
  const model = route.path[1] ?? "";
  useEffect(() => {
    const busiest = [...(index.data?.models ?? [])].filter((one) => one.loaded).sort((a, b) => (b.requests_per_s ?? 0) - (a.requests_per_s ?? 0))[0];
    // Unless the user has gone elsewhere meanwhile.
    if (!model && busiest && parse(location.hash).path.join() === "batching") replace(["batching", busiest.id]);
  }, [model, index.data]);
  return html`
    <header class="view-head">
      <h1>Batching</h1>
      <div class="controls">
        <select aria-label="Model" value=${model} onChange=${(event) => event.target.value && go(["batching", event.target.value])}>
          <option value="">Choose a model</option>
          ${[...new Set(model ? [model, ...names] : names)].sort().map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select>
        ${model ? html`<a class="button" href=${link(["try", model])}>Try it</a><a class="button" href=${link(["models", model], { tab: "configuration" })}>Configuration</a>` : null}
      </div>
    </header>
    ${model ? html`<${Picture} key=${model} model=${model} />` : index.data ? html`<p class="note">No model is loaded.</p>` : html`<${Waiting} error=${index.error} what="the models" />`}
  `;
}

function Picture({ model }) {
  const palette = useColours();
  const place = useRef(null);
  const [width, setWidth] = useState(900);
  const [isHeld, setHeld] = useState(false);
  const [error, setError] = useState(null);
  const held = useRef({ next: 0, after: 0, batches: [], dropped: 0, settings: null });
  const [feed, setFeed] = useState(null);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.round(entry.contentRect.width)));
    observer.observe(place.current);
    return () => observer.disconnect();
  }, []);
  useTick(
    async (signal) => {
      const state = held.current;
      let answer;
      try {
        answer = await get(`/api/batching?${new URLSearchParams({ model, after: state.after })}`, signal);
      } catch (failure) {
        if (!signal.aborted) setError(failure);
        throw failure;
      }
      setError(null);
      const known = new Map(state.batches.map((batch) => [batch.seq, batch]));
      for (const batch of answer.batches) known.set(batch.seq, batch);
      state.batches = [...known.values()].slice(-KEPT);
      // The first answer counts those of earlier times too.
      if (state.next && state.after === state.next) state.dropped += answer.dropped;
      state.next = answer.next;
      // Batches that still ran are asked for again: their times are reported when they end.
      const running = state.batches.find((batch) => batch.busy_us === null && batch.at_ms > (state.batches.at(-1)?.at_ms ?? 0) - RUNNING_MS);
      state.after = Math.min(state.next, (running?.seq ?? Infinity) - 1);
      state.settings = answer.settings;
      setFeed({ batches: state.batches, settings: state.settings, dropped: state.dropped, atMs: Date.now() });
    },
    TICK_MS,
    [model],
  );
  const frozen = useRef(null);
  if (!isHeld) frozen.current = feed;
  const shown = isHeld ? frozen.current : feed;
  const slots = Math.max(10, Math.floor((width - 64) / COLUMN_PX));
  const batches = shown?.batches ?? [];
  const newest = batches.at(-1)?.at_ms ?? 0;
  const recent = useMemo(() => batches.filter((batch) => batch.at_ms > newest - EXPLAINED_MS), [batches, newest]);
  const figures = useMemo(() => figuresOf(recent, shown?.settings), [recent, shown?.settings]);
  const sentences = useMemo(() => explained(figures), [figures]);
  const batchPicture = useMemo(() => batchOption(batches, shown?.settings, slots, palette), [batches, slots, palette, shown?.settings]);
  const sizes = useMemo(() => sizeOption(recent, shown?.settings, palette), [recent, palette, shown?.settings]);
  const lanes = useMemo(() => instanceOption(batches, newest, LANES_MS, palette), [batches, newest, palette]);
  return html`
    <div ref=${place}>
      <div class="explanation" role="status">${shown ? sentences.map((sentence) => html`<p key=${sentence}>${sentence}</p>`) : html`<${Waiting} error=${error} what="the schedulers' reports" />`}</div>
      ${error && shown ? html`<p class="failure">${error.message}</p>` : null}
      <div class="figures">
        <${Figure} label="Batches seen" value=${grouped(figures?.batches ?? 0)} title="In the last 15 s of what is shown" />
        <${Figure} label="Mean size" value=${figures ? number(figures.meanRows) : "–"} unit=" rows" />
        <${Figure} label="Rows used" value=${figures ? percent(figures.used) : "–"} title="Of batches times max_batch_size" />
        <${Figure} label="Padding" value=${figures ? percent(figures.padded) : "–"} title="Of what instances run" />
        <${Figure} label="Median wait" value=${figures ? duration(figures.medianWaitUs) : "–"} />
        <${Figure} label="Full" value=${figures ? percent(figures.full) : "–"} title="Batches with max_batch_size rows" />
        <${Figure} label="Held to the delay" value=${figures ? percent(figures.delayed) : "–"} title="Batches that left because max_queue_delay ended" />
      </div>
      <section>
        <header class="picture-head">
          <h2 class="small-head">Batches as they form</h2>
          <p class="legend waits">${["waited briefly", "", "", "", "longest"].map((text, step) => html`<span key=${step} style="--key: ${palette.waits[step]}">${text}</span>`)}<span style="--key: ${palette.line}">padding</span></p>
          <button type="button" aria-pressed=${String(isHeld)} onClick=${() => setHeld(!isHeld)} title="Holds the picture, so that batches can be looked at">${isHeld ? "Go on" : "Hold"}</button>
        </header>
        <${Chart} option=${batchPicture} replaced=${["series"]} height="344px" label="The last ${Math.min(slots, batches.length)} batches: rows above the line, waits below. ${sentences[0]}" />
        <p class="note">A column is a batch, the newest at the right. Above the line are its rows; below it, how long its requests waited.${shown?.dropped ? ` ${grouped(shown.dropped)} batches are not shown: there are more than the feed reports.` : ""}</p>
      </section>
      <div class="two">
        <section><h2 class="small-head">Sizes</h2><${Chart} option=${sizes} height="150px" label="Batches by their number of rows" /></section>
        <section><h2 class="small-head">Instances, the last ${LANES_MS / 1000} s</h2><${Chart} key=${lanes.lanes} option=${lanes.option} replaced=${["series"]} height="${Math.max(60, Math.min(12, lanes.lanes) * 22 + 30)}px" label="When ${lanes.lanes} instances ran batches" /></section>
      </div>
    </div>
  `;
}
