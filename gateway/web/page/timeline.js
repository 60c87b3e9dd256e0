// The timeline of one request, and the sentence that says what cost most.

import { html, useEffect, useState } from "/page/vendor/htm-preact.js";
import { json } from "/page/api.js";
import { recentRequests } from "/page/chat/database.js";

const PHASES = {
  queued: "in the queue", encoding: "waits for the image encoder", prefill: "computing the prompt", decode: "computing output tokens",
  preempted: "lost its KV blocks, waits to start again", recomputed: "computing lost tokens again",
  paused: "holds KV blocks; the policy runs other requests", swapped: "its KV is in host memory", restart: "waits for a new worker", reader: "the client does not read",
};

export function Timeline({ argument }) {
  const [id, setId] = useState(argument);
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    setId(argument);
    if (!argument) { setFound(null); setError(null); return undefined; }
    let timer;
    let isOpen = true;
    async function load() {
      try {
        const timeline = await json(`/v1/requests/${encodeURIComponent(argument)}/timeline`);
        if (!isOpen) return;
        setFound(timeline);
        setError(null);
        if (timeline.choices.some((choice) => !choice.ended)) timer = setTimeout(load, 500);
      } catch (failure) {
        if (isOpen) { setFound(null); setError(failure); }
      }
    }
    load();
    return () => { isOpen = false; clearTimeout(timer); };
  }, [argument]);
  const submit = (event) => { event.preventDefault(); location.hash = `request/${encodeURIComponent(id.trim())}`; };
  return html`
    <h1>Why was a request slow?</h1>
    <form class="bar plain" onSubmit=${submit}>
      <label class="grow"><span>Request id: the <code>x-request-id</code> header of its response</span>
        <input value=${id} onInput=${(event) => setId(event.target.value)} /></label>
      <button class="primary" disabled=${!id.trim()}>Show</button>
    </form>
    ${error && html`<p class="error" role="alert">${error.message}</p>
      <p class="soft">The server keeps the last 1,000 requests, and shows each to the API key that sent it.</p>`}
    ${found && html`<${Spans} timeline=${found} />`}
    ${!argument && html`<${Recent} />`}`;
}

function Recent() {
  const [requests, setRequests] = useState([]);
  useEffect(() => { recentRequests().then(setRequests, () => {}); }, []);
  if (!requests.length)
    return html`<p class="soft">Every answer of the <a href="#chat">chat</a> links to its timeline, as does every request of the${" "}
      <a href="#engine">engine</a> view. In a terminal: <code>podway explain ID</code>.</p>`;
  return html`<h2>Latest answers of the chat</h2>
    <ul>${requests.map(({ id, text }) => html`<li><a href="#request/${encodeURIComponent(id)}">${id}</a> <span class="soft">${text}</span></li>`)}</ul>`;
}

const seconds = (value) => (value < 1 ? `${(value * 1000).toFixed(1)} ms` : `${value.toFixed(2)} s`);
const describe = (spans) => spans.map((span) => `${span.phase} ${seconds(span.seconds)}`).join(", ");

// Bars on a common time axis of `total` seconds.
function Lane({ spans, total }) {
  return html`<svg class="lane" viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" aria-label=${describe(spans)}>
    ${spans.map((span) => html`<rect class="phase-${span.phase}" x=${(span.start / total) * 1000} y="0" height="20"
      width=${Math.max(1.5, (span.seconds / total) * 1000)}><title>${span.phase} ${seconds(span.seconds)}</title></rect>`)}</svg>`;
}

function Spans({ timeline }) {
  const waits = timeline.reader_waits.map((wait) => ({ phase: "reader", ...wait }));
  const all = [...timeline.choices.flatMap((choice) => choice.spans), ...waits];
  const total = Math.max(1e-6, ...all.map((span) => span.start + span.seconds));
  const phases = [...new Set(all.map((span) => span.phase))];
  return html`<p class="explanation">${timeline.explanation}</p>
    <p class="legend">${phases.map((phase) => html`<span><i class="phase-${phase}"></i>${phase}: ${PHASES[phase]}</span>`)}</p>
    ${timeline.choices.map((choice) => html`
      ${timeline.choices.length > 1 && html`<h2>Choice ${choice.index}</h2>`}
      <${Lane} spans=${choice.spans} total=${total} />`)}
    ${waits.length > 0 && html`<h2>Client</h2><${Lane} spans=${waits} total=${total} />`}
    <p class="axis soft"><span>0</span><span>${seconds(total / 2)}</span><span>${seconds(total)}</span></p>
    ${timeline.choices.map((choice) => html`
      <p class="soft">${timeline.choices.length > 1 ? `Choice ${choice.index}: ` : ""}${choice.state}; ${choice.prompt_tokens} prompt tokens
        (${choice.cached_tokens} cached) in ${choice.prefill_pieces} ${choice.prefill_pieces === 1 ? "piece" : "pieces"}; ${choice.completion_tokens} output tokens</p>
      <div class="scroll" tabindex="0" role="region" aria-label="Phases"><table>
        <thead><tr><th>Phase</th><th class="number">Starts after</th><th class="number">Lasts</th><th class="number">Tokens</th></tr></thead>
        <tbody>${[...choice.spans, ...(choice.index === 0 ? waits : [])].map((span) => html`<tr>
          <td><i class="dot phase-${span.phase}"></i>${span.phase}</td><td class="number">${seconds(span.start)}</td>
          <td class="number">${seconds(span.seconds)}</td><td class="number">${span.tokens ?? ""}</td></tr>`)}</tbody>
      </table></div>`)}`;
}
