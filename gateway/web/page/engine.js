// The engine, live: iterations, KV blocks, queues and requests, from the events of /admin/live.

import { html, useEffect, useRef, useState } from "/page/vendor/htm-preact.js";
import { call, events } from "/page/api.js";
import { Policy } from "/page/policy.js";
import { Terms, TERMS } from "/page/terms.js";

const STRIP_ITERATIONS = 160;
const CELLS = 600;

// The latest snapshot, and the iterations since the view was opened; reconnects after errors.
function useLive(model) {
  const [live, setLive] = useState({ snapshot: null, iterations: [], error: null });
  useEffect(() => {
    const abort = new AbortController();
    let iterations = [];
    let timer;
    async function watch() {
      try {
        const query = model ? `?model=${encodeURIComponent(model)}` : "";
        const response = await call(`/admin/live${query}`, { signal: abort.signal });
        for await (const snapshot of events(response)) {
          iterations = [...iterations, ...snapshot.iterations].slice(-STRIP_ITERATIONS);
          setLive({ snapshot, iterations, error: null });
        }
        timer = setTimeout(watch, 1000);
      } catch (error) {
        if (error.name === "AbortError") return;
        setLive((before) => ({ ...before, error }));
        if (error.status !== 401 && error.status !== 403) timer = setTimeout(watch, 1000);
      }
    }
    watch();
    return () => { clearTimeout(timer); abort.abort(); };
  }, [model]);
  return live;
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

// One column per iteration, one row per request; the height of a column's foot is its step time.
function Strip({ iterations }) {
  const canvas = useRef();
  useEffect(() => {
    const { width, height } = canvas.current.getBoundingClientRect();
    const scale = devicePixelRatio;
    Object.assign(canvas.current, { width: width * scale, height: height * scale });
    const context = canvas.current.getContext("2d");
    context.scale(scale, scale);
    const places = new Map();
    for (const each of iterations) for (const [id] of each.rows) if (!places.has(id)) places.set(id, places.size);
    const foot = 40;
    const tall = Math.min(14, (height - foot) / Math.max(1, places.size));
    const wide = width / STRIP_ITERATIONS;
    const longest = Math.max(1e-6, ...iterations.map((each) => each.seconds));
    const tones = [color("decode"), color("prefill")];
    const soft = color("soft");
    iterations.forEach((each, column) => {
      for (const [id, , isPrefill] of each.rows) {
        context.fillStyle = tones[Number(isPrefill)];
        context.fillRect(column * wide, places.get(id) * tall, Math.max(1, wide - 1), Math.max(1, tall - 1));
      }
      const size = (each.seconds / longest) * (foot - 6);
      context.fillStyle = soft;
      context.fillRect(column * wide, height - size, Math.max(1, wide - 1), size);
    });
  });
  const last = iterations.at(-1);
  return html`<canvas class="strip" ref=${canvas} role="img"
      aria-label="The last ${iterations.length} iterations; the latest has ${last?.rows.length ?? 0} requests"></canvas>
    <p class="legend"><span><i class="prefill"></i>prefill</span><span><i class="decode"></i>decode</span>
      <span>a column is an iteration, a row a request; the foot is the step time</span></p>`;
}

// Step times as a line over the iterations of the strip.
function Chart({ iterations }) {
  const times = iterations.map((each) => each.seconds * 1000);
  const longest = Math.max(1e-3, ...times);
  const points = times.map((time, place) => `${place},${100 * (1 - time / longest)}`).join(" ");
  return html`<svg class="chart" viewBox="0 0 ${STRIP_ITERATIONS - 1} 100" preserveAspectRatio="none" role="img"
      aria-label="Step time in milliseconds by iteration"><polyline points=${points} /></svg>
    <p class="axis soft"><span>iteration ${iterations[0]?.number ?? 0}</span><span>longest ${longest.toFixed(1)} ms, latest ${(times.at(-1) ?? 0).toFixed(1)} ms</span>
      <span>${iterations.at(-1)?.number ?? 0}</span></p>`;
}

function Blocks({ title, term, tier }) {
  const total = tier.free + tier.held + tier.cached + tier.moving;
  if (!total) return null;
  const cells = [];
  const shown = Math.min(total, CELLS);
  for (const state of ["held", "moving", "cached"]) {
    const count = tier[state] ? Math.max(1, Math.round((tier[state] / total) * shown)) : 0;
    for (let each = count; each > 0 && cells.length < shown; each -= 1) cells.push(state);
  }
  while (cells.length < shown) cells.push("free");
  return html`<h2 title=${TERMS[term]}>${title} <small>${total} blocks of ${tier.block_size} tokens</small></h2>
    <div class="blocks" role="img" aria-label="${tier.held} held, ${tier.cached} cached, ${tier.moving} moving, ${tier.free} free">
      ${cells.map((state) => html`<i class=${state}></i>`)}</div>
    <p class="legend"><span title=${TERMS.held}><i class="held"></i>held <b class="kv-held">${tier.held}</b></span>
      <span title=${TERMS.cached}><i class="cached"></i>cached ${tier.cached}</span>
      <span title=${TERMS.moving}><i class="moving"></i>moving ${tier.moving}</span>
      <span><i></i>free ${tier.free}</span>
      ${total > 1.5 * CELLS && html`<span>a square is about ${Math.round(total / CELLS)} blocks</span>`}</p>`;
}

function Levels({ sizes }) {
  if (!sizes.length) return null;
  const most = Math.max(1, ...sizes);
  const shown = sizes.slice(0, Math.max(4, sizes.findLastIndex((size) => size > 0) + 1));
  return html`<h2 title=${TERMS.level}>Queues by policy level</h2>
    <table class="levels"><tbody>${shown.map((size, level) => html`<tr>
      <th scope="row">level ${level}</th><td class="number">${size}</td>
      <td class="wide"><meter min="0" max=${most} value=${size} aria-label="level ${level}: ${size} requests"></meter></td></tr>`)}</tbody></table>
    ${shown.length < sizes.length && html`<p class="soft">${sizes.length - shown.length} lower levels are empty</p>`}`;
}

function Requests({ requests, hidden, hasLevels, onError }) {
  const cancel = (request) =>
    call(`/v1/requests/${encodeURIComponent(request.label)}/cancel`, { method: "POST" }).catch(onError);
  if (!requests.length)
    return html`<p class="soft">No requests now. Send one in the <a href="#chat">chat</a>, or with any client of OpenAI's API.</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Requests"><table>
    <thead><tr><th>Request</th><th>State</th>${hasLevels && html`<th class="number" title=${TERMS.level}>Level</th>`}
      <th class="number">Age s</th><th class="number" title=${TERMS.computed}>Computed</th><th class="number">Prompt</th>
      <th class="number">Output</th><th class="number" title=${TERMS.cached}>Cached</th>
      <th class="number" title=${TERMS.preempted}>Preempted</th><th>Waits for</th><th><span class="hidden">Actions</span></th></tr></thead>
    <tbody>${requests.map((each) => html`<tr key=${each.id}>
      <td>${each.label ? html`<a href="#request/${encodeURIComponent(each.label)}" title=${each.label}>${each.label.slice(0, 16)}</a>` : each.id}</td>
      <td><i class="dot state-${each.state}"></i>${each.state}</td>${hasLevels && html`<td class="number">${each.level ?? ""}</td>`}
      <td class="number">${each.age.toFixed(1)}</td><td class="number">${each.computed}</td><td class="number">${each.prompt}</td>
      <td class="number">${each.output}</td><td class="number">${each.cached}</td><td class="number">${each.preemptions || ""}</td>
      <td>${each.waits_for}</td>
      <td>${each.label && html`<button class="small" onClick=${() => cancel(each)} aria-label="Cancel ${each.label}">Cancel</button>`}</td>
    </tr>`)}</tbody></table></div>
    ${hidden > 0 && html`<p class="soft">and ${hidden} more</p>`}`;
}

function Tile({ name, value }) {
  return html`<div class="tile" title=${TERMS[name]}><b data-figure=${name}>${value}</b>${name}</div>`;
}

// Of several models, the one whose engine is shown; at first one that is loaded.
function ModelChoice({ models, model, onModel }) {
  if (models.length < 2) return null;
  return html`<select aria-label="Model" onChange=${(event) => onModel(event.target.value)}>
    <option value="" selected=${!model}>a loaded model</option>
    ${models.map(({ id }) => html`<option value=${id} selected=${id === model}>${id}</option>`)}
  </select>`;
}

export function Engine({ models }) {
  const [model, setModel] = useState("");
  const { snapshot, iterations, error } = useLive(model);
  const [failed, setFailed] = useState(null);
  const choice = html`<${ModelChoice} models=${models} model=${model} onModel=${setModel} />`;
  if (!snapshot) {
    if (!error) return html`<p role="status">Connecting …</p>`;
    return html`<h1>Engine</h1>${choice}<p class="error" role="alert">${error.message}</p>
      ${error.status === 403 && html`<p>The live view needs an admin key (<code>--admin-api-key</code>). “API key” above changes the key of this tab.</p>`}`;
  }
  const { counts } = snapshot;
  const tiles = {
    running: counts.running, waiting: counts.waiting, swapped: counts.swapped,
    "tokens/s": snapshot.tokens_per_second.toFixed(0), "loop lag ms": (snapshot.loop_lag * 1000).toFixed(1),
    worker: snapshot.worker_state, "worker restarts": snapshot.worker_restarts,
  };
  const hidden = snapshot.num_requests - snapshot.requests.length;
  return html`
    <h1>Engine</h1>
    ${choice}
    ${(error || failed) && html`<p class="error" role="alert">${(error || failed).message}</p>`}
    <div class="tiles">${Object.entries(tiles).map(([name, value]) => html`<${Tile} name=${name} value=${value} />`)}</div>
    <${Policy} snapshot=${snapshot} onError=${setFailed} />
    <h2 title=${TERMS.iteration}>Iterations</h2>
    <${Strip} iterations=${iterations} />
    <div class="columns">
      <section><${Blocks} title="KV cache" term="KV block" tier=${snapshot.kv.device} />
        <${Blocks} title="Host tier" term="swapped" tier=${snapshot.kv.host} /></section>
      <section><h2>Step time <small>ms</small></h2><${Chart} iterations=${iterations} />
        <${Levels} sizes=${snapshot.levels} /></section>
    </div>
    <h2>Requests <small>${snapshot.num_requests}</small></h2>
    <${Requests} requests=${snapshot.requests} hidden=${hidden} hasLevels=${snapshot.levels.length > 0} onError=${setFailed} />
    <${Terms} />`;
}
