// A recording (`podway serve --record FILE`): scrub through it, and compare it with another policy.

import { html, useEffect, useMemo, useRef, useState } from "/page/vendor/htm-preact.js";
import { key, json } from "/page/api.js";

// The iterations and requests of a recording's event lines.
function parse(text) {
  const iterations = new Map();
  const requests = new Map();
  for (const line of text.split("\n")) {
    if (!line) continue;
    const row = JSON.parse(line);
    if ("arrived" in row) requests.set(row.arrived, { arrived: row.at, prompt: row.prompt });
    else if ("planned" in row) iterations.set(row.planned, { at: row.at, rows: row.entries });
    else if ("committed" in row) {
      const iteration = iterations.get(row.committed);
      if (!iteration) continue;
      iteration.end = row.at;
      for (const [id, start, count] of iteration.rows) {
        const request = requests.get(id);
        if (request && request.first === undefined && start + count >= request.prompt) request.first = row.at;
      }
    } else if ("ended" in row) {
      const request = requests.get(row.ended);
      if (request) Object.assign(request, { ended: row.at, outcome: row.outcome, produced: row.produced });
    }
  }
  const done = [...iterations.values()].filter((each) => each.end !== undefined);
  if (!done.length) throw new Error("it has no iterations");
  return { iterations: done, requests: [...requests.values()] };
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// Interpolated linearly, as podway simulate does.
function quantile(values, share) {
  const sorted = values.toSorted((a, b) => a - b);
  const place = share * (sorted.length - 1);
  const below = Math.floor(place);
  return sorted[below] + (place - below) * ((sorted[below + 1] ?? sorted[below]) - sorted[below]);
}

function figures({ requests }) {
  const finished = requests.filter((each) => each.outcome === "finished" && each.first !== undefined);
  if (!finished.length) return null;
  const jct = finished.map((each) => each.ended - each.arrived);
  const ttft = finished.map((each) => each.first - each.arrived);
  return {
    finished: finished.length, "mean JCT s": mean(jct).toFixed(2), "p99 JCT s": quantile(jct, 0.99).toFixed(2),
    "p50 TTFT s": quantile(ttft, 0.5).toFixed(2), "p99 TTFT s": quantile(ttft, 0.99).toFixed(2),
  };
}

const WINDOW = 120; // recorded iterations shown at once
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

const duration = ({ iterations }) => iterations.at(-1).end - iterations[0].at;

// The iterations between two moments, in seconds after the first iteration; a row is a request.
function Strip({ title, recording, from, seconds }) {
  const canvas = useRef();
  const { iterations } = recording;
  const began = iterations[0].at + from;
  const shown = iterations.filter(({ at, end }) => end > began && at < began + seconds);
  useEffect(() => {
    const { width, height } = canvas.current.getBoundingClientRect();
    Object.assign(canvas.current, { width: width * devicePixelRatio, height: height * devicePixelRatio });
    const context = canvas.current.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    const places = new Map();
    for (const { rows } of shown) for (const [id] of rows) if (!places.has(id)) places.set(id, places.size);
    const tall = Math.min(14, height / Math.max(1, places.size));
    const tones = [color("decode"), color("prefill")];
    for (const { at, end, rows } of shown)
      for (const [id, , count] of rows) {
        context.fillStyle = tones[Number(count > 1)];
        context.fillRect(((at - began) / seconds) * width, places.get(id) * tall,
          Math.max(1, ((end - at) / seconds) * width - 0.5), Math.max(1, tall - 1));
      }
  });
  return html`<h2>${title} <small>${shown.length} of ${iterations.length} iterations</small></h2>
    <canvas class="strip" ref=${canvas} role="img" aria-label="${title}: ${shown.length} iterations"></canvas>`;
}

function Comparison({ runs }) {
  const columns = runs.map(([title, recording]) => [title, figures(recording)]).filter(([, found]) => found);
  if (!columns.length) return null;
  return html`<table><thead><tr><th></th>${columns.map(([title]) => html`<th class="number">${title}</th>`)}</tr></thead>
    <tbody>${Object.keys(columns[0][1]).map((name) => html`<tr><td>${name}</td>
      ${columns.map(([, found]) => html`<td class="number">${found[name]}</td>`)}</tr>`)}</tbody></table>`;
}

export function Replay() {
  const [text, setText] = useState(null);
  const [other, setOther] = useState(null);
  const [policies, setPolicies] = useState([]);
  const [policy, setPolicy] = useState("mlfq");
  const [share, setShare] = useState(0);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  useEffect(() => { json("/admin/policy").then((found) => setPolicies(found.policies)).catch(() => {}); }, []);
  const recording = useMemo(() => (text === null ? null : parse(text)), [text]);

  async function open(event) {
    try {
      const read = await event.target.files[0].text();
      parse(read);
      setText(read);
      setOther(null);
      setError(null);
    } catch (failure) {
      setError(`The file is not a recording: ${failure.message}`);
    }
  }
  async function simulate() {
    setBusy(true);
    setError(null);
    try {
      const headers = { "content-type": "application/jsonl" };
      if (key.get()) headers.authorization = `Bearer ${key.get()}`;
      const response = await fetch(`/admin/simulate?policy=${policy}`, { method: "POST", headers, body: text });
      if (!response.ok) throw new Error((await response.json()).error.message);
      setOther([policy, parse(await response.text())]);
    } catch (failure) {
      setError(failure.message);
    }
    setBusy(false);
  }
  let seconds = 1;
  let from = 0;
  if (recording) {
    const longest = Math.max(duration(recording), other ? duration(other[1]) : 0) || 1e-9;
    seconds = Math.min(1, WINDOW / recording.iterations.length) * (duration(recording) || 1e-9);
    from = share * Math.max(0, longest - seconds);
  }
  return html`
    <h1>Replay a recording</h1>
    <p>Record with <code>podway serve --record FILE</code>. A recording has no texts. “Simulate” plays its requests
      in virtual time under another policy, with the same costs of an iteration.</p>
    <div class="bar plain"><label>Recording<input type="file" accept=".jsonl" onChange=${open} /></label>
      ${recording && html`<label>Other policy
          <select value=${policy} onChange=${(event) => setPolicy(event.target.value)}>
            ${policies.map((name) => html`<option value=${name} selected=${name === policy}>${name}</option>`)}</select></label>
        <button class="primary" disabled=${busy} onClick=${simulate}>${busy ? "Simulating …" : "Simulate"}</button>`}
    </div>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${recording && html`
      <label>Position<input type="range" min="0" max="1" step="0.001" value=${share}
        onInput=${(event) => setShare(Number(event.target.value))} /></label>
      <${Strip} title="Recorded" recording=${recording} from=${from} seconds=${seconds} />
      ${other && html`<${Strip} title="Under ${other[0]}" recording=${other[1]} from=${from} seconds=${seconds} />`}
      <p class="axis soft"><span>${from.toFixed(2)} s</span><span>${(from + seconds).toFixed(2)} s</span></p>
      <p class="legend"><span><i class="prefill"></i>prefill</span><span><i class="decode"></i>decode</span>
        <span>a column is an iteration, a row a request; both strips show the same seconds</span></p>
      <${Comparison} runs=${[["recorded", recording], ...(other ? [[other[0], other[1]]] : [])]} />`}`;
}
