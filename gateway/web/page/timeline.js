// The timeline of one request, and the sentence that says what cost most.

import { html, useEffect, useState } from "/page/vendor/htm-preact.js";
import { json } from "/page/api.js";

export function Timeline({ argument }) {
  const [id, setId] = useState(argument);
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const load = (name) =>
    json(`/v1/requests/${encodeURIComponent(name)}/timeline`)
      .then((timeline) => { setFound(timeline); setError(null); })
      .catch((failure) => { setFound(null); setError(failure); });
  useEffect(() => { setId(argument); if (argument) load(argument); }, [argument]);
  const submit = (event) => { event.preventDefault(); location.hash = `request/${encodeURIComponent(id.trim())}`; };
  return html`
    <h1>Why was a request slow?</h1>
    <form class="bar" onSubmit=${submit}>
      <label>Request id (the x-request-id of its response)
        <input size="40" value=${id} onInput=${(event) => setId(event.target.value)} /></label>
      <button class="primary" disabled=${!id.trim()}>Show</button>
    </form>
    ${error && html`<p class="error" role="alert">${error.message}</p>`}
    ${found && html`<${Spans} timeline=${found} />`}`;
}

const seconds = (value) => (value < 1 ? `${(value * 1000).toFixed(1)} ms` : `${value.toFixed(2)} s`);

function Spans({ timeline }) {
  return html`<p class="explanation"><strong>${timeline.explanation}</strong></p>
    ${timeline.choices.map((choice) => html`
      ${timeline.choices.length > 1 && html`<h2>Choice ${choice.index}</h2>`}
      <div class="lane" role="img" aria-label=${choice.spans.map((span) => `${span.phase} ${seconds(span.seconds)}`).join(", ")}>
        ${choice.spans.map((span) => html`<span class="phase-${span.phase}" title="${span.phase} ${seconds(span.seconds)}"
          ref=${(element) => element && (element.style.flexGrow = span.seconds)}></span>`)}</div>
      <div class="scroll" tabindex="0" role="region" aria-label="Spans"><table>
        <thead><tr><th>Phase</th><th class="number">Starts after</th><th class="number">Lasts</th><th class="number">Tokens</th></tr></thead>
        <tbody>${choice.spans.map((span) => html`<tr><td>${span.phase}</td><td class="number">${seconds(span.start)}</td>
          <td class="number">${seconds(span.seconds)}</td><td class="number">${span.tokens ?? ""}</td></tr>`)}</tbody>
      </table></div>`)}`;
}
