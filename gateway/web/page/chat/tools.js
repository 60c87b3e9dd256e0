// Tool calls of an answer, and a form for their results: this page runs no tools.

import { html, useState } from "/page/vendor/htm-preact.js";
import { Code } from "/page/markdown/code.js";

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is not complete yet
  }
}

export function Calls({ node, isWaiting, onResults }) {
  const calls = node.calls ?? [];
  const [results, setResults] = useState({});
  if (!calls.length) return null;
  const submit = (event) => {
    event.preventDefault();
    onResults(calls.map((_, place) => results[place] ?? ""));
  };
  return html`<form class="calls" onSubmit=${submit}>${calls.map((call, place) => html`
      <details class="call" open><summary>Tool call: <code>${call.name}</code></summary>
        <${Code} text=${indented(call.arguments)} language="json" /></details>
      ${isWaiting && html`<label>Result of ${call.name}
        <textarea rows="2" onInput=${(event) => setResults({ ...results, [place]: event.target.value })}></textarea></label>`}`)}
    ${isWaiting && html`<button class="primary">Send ${calls.length === 1 ? "result" : "results"}</button>`}
  </form>`;
}

// Why a text is no list of tools; an empty string if it is one or empty.
export function toolsError(text) {
  if (!text.trim()) return "";
  try {
    const tools = JSON.parse(text);
    const isTool = (tool) => tool?.type === "function" && typeof tool.function?.name === "string";
    return Array.isArray(tools) && tools.every(isTool) ? "" : 'Tools are a list of {"type": "function", "function": {"name": …}}.';
  } catch (error) {
    return `Tools are not JSON: ${error.message}`;
  }
}
