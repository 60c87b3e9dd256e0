// The engine, live: iterations, KV blocks, queues and requests, from the events of /admin/live.

import { html, useEffect, useRef, useState } from "/page/vendor/htm-preact.js";
import { call, events } from "/page/api.js";

const STRIP_ITERATIONS = 160;
const CELLS = 400;

// The latest snapshot, and the iterations since the view was opened; reconnects after errors.
function useLive() {
  const [live, setLive] = useState({ snapshot: null, iterations: [], error: null });
  useEffect(() => {
    const abort = new AbortController();
    let iterations = [];
    let timer;
    async function watch() {
      try {
        const response = await call("/admin/live", { signal: abort.signal });
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
  }, []);
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
    const rows = [...new Set(iterations.flatMap((each) => each.rows.map(([id]) => id)))];
    const foot = 40;
    const tall = Math.min(14, (height - foot) / Math.max(1, rows.length));
    const wide = width / STRIP_ITERATIONS;
    const longest = Math.max(1e-6, ...iterations.map((each) => each.seconds));
    iterations.forEach((each, column) => {
      for (const [id, , isPrefill] of each.rows) {
        context.fillStyle = color(isPrefill ? "prefill" : "decode");
        context.fillRect(column * wide, rows.indexOf(id) * tall, Math.max(1, wide - 1), Math.max(1, tall - 1));
      }
      const size = (each.seconds / longest) * (foot - 6);
      context.fillStyle = color("soft");
      context.fillRect(column * wide, height - size, Math.max(1, wide - 1), size);
    });
  });
  const last = iterations.at(-1);
  return html`<canvas class="strip" ref=${canvas} role="img"
      aria-label="The last ${iterations.length} iterations; the latest has ${last?.rows.length ?? 0} requests"></canvas>
    <p class="legend"><span><i class="prefill"></i>prefill</span><span><i class="decode"></i>decode</span>
      <span>foot: step time</span></p>`;
}

function Chart({ iterations }) {
  const box = useRef();
  const plot = useRef();
  useEffect(() => {
    const make = () => new uPlot({
      width: box.current.clientWidth, height: 140, legend: { show: false }, cursor: { show: false },
      scales: { x: { time: false } },
      axes: [{ stroke: color("soft"), grid: { stroke: color("line") } },
             { stroke: color("soft"), grid: { stroke: color("line") }, size: 60 }],
      series: [{}, { stroke: color("decode"), width: 1.5, label: "step ms" }],
    }, [[], []], box.current);
    plot.current = make();
    return () => plot.current.destroy();
  }, []);
  useEffect(() => {
    plot.current.setData([iterations.map((each) => each.number), iterations.map((each) => each.seconds * 1000)]);
  });
  return html`<div ref=${box} role="img" aria-label="Step time in milliseconds by iteration"></div>`;
}

function Blocks({ title, tier }) {
  const total = tier.free + tier.held + tier.cached + tier.moving;
  if (!total) return null;
  const cells = [];
  for (const state of ["held", "moving", "cached"])
    for (let each = Math.round((tier[state] / total) * Math.min(total, CELLS)); each > 0; each -= 1) cells.push(state);
  while (cells.length < Math.min(total, CELLS)) cells.push("free");
  return html`<h2>${title}: ${total} blocks of ${tier.block_size} tokens</h2>
    <div class="blocks" role="img" aria-label="${tier.held} held, ${tier.cached} cached, ${tier.moving} moving, ${tier.free} free">
      ${cells.map((state) => html`<i class=${state}></i>`)}</div>
    <p class="legend"><span><i class="held"></i>held <b class="kv-held">${tier.held}</b></span><span><i class="cached"></i>cached ${tier.cached}</span>
      <span><i class="moving"></i>moving ${tier.moving}</span><span><i></i>free ${tier.free}</span></p>`;
}

function Policy({ snapshot, onError }) {
  const choose = (event) =>
    call("/admin/policy", { method: "POST", body: { policy: event.target.value } }).catch(onError);
  return html`<label class="row">Policy
    <select value=${snapshot.policy} onChange=${choose}>
      ${snapshot.policies.map((name) => html`<option value=${name} selected=${name === snapshot.policy}>${name}</option>`)}</select></label>`;
}

const tokens = (request) => `${request.computed} / ${request.prompt} + ${request.output}`;

function Requests({ requests, hidden, onError }) {
  const cancel = (request) =>
    call(`/v1/requests/${encodeURIComponent(request.label)}/cancel`, { method: "POST" }).catch(onError);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Requests"><table>
    <thead><tr><th>Request</th><th>State</th><th class="number">Age s</th><th class="number">Computed / prompt + output</th>
      <th class="number">Cached</th><th>Waits for</th><th></th></tr></thead>
    <tbody>${requests.map((each) => html`<tr key=${each.id}>
      <td>${each.label ? html`<a href="#request/${encodeURIComponent(each.label)}">${each.label.slice(0, 20)}</a>` : each.id}</td>
      <td>${each.state}${each.level === null ? "" : ` (level ${each.level})`}</td><td class="number">${each.age.toFixed(1)}</td>
      <td class="number">${tokens(each)}</td><td class="number">${each.cached}</td><td>${each.waits_for}</td>
      <td>${each.label && html`<button onClick=${() => cancel(each)} aria-label="Cancel ${each.label}">Cancel</button>`}</td>
    </tr>`)}</tbody></table></div>
    ${hidden > 0 && html`<p class="soft">and ${hidden} more</p>`}`;
}

export function Engine() {
  const { snapshot, iterations, error } = useLive();
  const [failed, setFailed] = useState(null);
  if (!snapshot) return html`<p role="status">${error ? error.message : "Connecting …"}</p>`;
  const { counts } = snapshot;
  const tiles = {
    running: counts.running, waiting: counts.waiting, swapped: counts.swapped,
    "tokens/s": snapshot.tokens_per_second.toFixed(0), "loop lag ms": (snapshot.loop_lag * 1000).toFixed(1),
    "worker restarts": snapshot.worker_restarts, worker: snapshot.worker_state,
  };
  return html`
    <h1>Engine</h1>
    ${(error || failed) && html`<p class="error" role="alert">${(error || failed).message}</p>`}
    <div class="tiles">${Object.entries(tiles).map(
      ([name, value]) => html`<div class="tile"><b data-figure=${name}>${value}</b>${name}</div>`,
    )}</div>
    <div class="bar"><${Policy} snapshot=${snapshot} onError=${setFailed} />
      <span class="soft">admission ${snapshot.admission}${snapshot.levels.length ? `; levels ${snapshot.levels.join(" / ")}` : ""}</span></div>
    <h2>Iterations</h2>
    <${Strip} iterations=${iterations} />
    <h2>Step time, ms</h2>
    <${Chart} iterations=${iterations} />
    <${Blocks} title="KV cache" tier=${snapshot.kv.device} />
    <${Blocks} title="Host tier" tier=${snapshot.kv.host} />
    <h2>Requests</h2>
    <${Requests} requests=${snapshot.requests} hidden=${snapshot.num_requests - snapshot.requests.length} onError=${setFailed} />`;
}
