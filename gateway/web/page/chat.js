// The chat. A conversation is a tree: editing a message or regenerating an answer adds a branch.
// Conversations are stored in this browser only.

import { html, useEffect, useRef, useState } from "/page/vendor/htm-preact.js";
import { call, events } from "/page/api.js";
import { markdown } from "/page/markdown.js";

const STORE = "podway-chat";
const SETTINGS = {
  temperature: { label: "Temperature", min: 0, max: 2, step: 0.1 },
  top_p: { label: "Top-p", min: 0, max: 1, step: 0.05 },
  max_tokens: { label: "Max tokens", min: 1, step: 1 },
  seed: { label: "Seed", step: 1 },
};

const empty = () => ({ nodes: {}, root: { children: [], chosen: 0 }, system: "", settings: {}, next: 1 });

function stored() {
  try {
    const found = JSON.parse(localStorage.getItem(STORE));
    return found?.nodes ? found : empty();
  } catch {
    return empty();
  }
}

const at = (chat, id) => (id === 0 ? chat.root : chat.nodes[id]);

// The messages of the chosen branch, from the first on.
function branch(chat) {
  const found = [];
  for (let node = chat.root; node.children.length; ) {
    node = chat.nodes[node.children[node.chosen]];
    found.push(node);
  }
  return found;
}

function add(chat, parentId, fields) {
  const node = { id: chat.next++, parent: parentId, children: [], chosen: 0, ...fields };
  chat.nodes[node.id] = node;
  const parent = at(chat, parentId);
  parent.chosen = parent.children.push(node.id) - 1;
  return node;
}

function requestBody(chat, model, upTo) {
  const messages = chat.system ? [{ role: "system", content: chat.system }] : [];
  for (const node of branch(chat)) {
    messages.push({ role: node.role, content: node.content });
    if (node.id === upTo) break;
  }
  const settings = Object.fromEntries(
    Object.entries(chat.settings).filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]),
  );
  return { model, messages, stream: true, stream_options: { include_usage: true }, ...settings };
}

function readDelta(node, delta) {
  node.content += delta.content || "";
  node.reasoning += delta.reasoning_content || delta.reasoning || "";
  for (const { index, function: part } of delta.tool_calls || []) {
    const known = (node.calls[index] ||= { name: "", arguments: "" });
    known.name += part?.name || "";
    known.arguments += part?.arguments || "";
  }
}

// Streams an answer into `node`, calling `changed` as it grows.
async function stream(node, body, signal, changed) {
  const began = performance.now();
  let first = null;
  const response = await call("/v1/chat/completions", { method: "POST", body, signal });
  node.request = response.headers.get("x-request-id");
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    if (event.choices?.[0]) {
      const { delta, finish_reason } = event.choices[0];
      if (first === null && (delta.content || delta.reasoning_content || delta.tool_calls)) first = performance.now();
      readDelta(node, delta);
      node.finish = finish_reason || node.finish;
    }
    if (event.usage) node.tokens = event.usage.completion_tokens;
    const seconds = (performance.now() - (first ?? performance.now())) / 1000;
    node.ttft = first === null ? null : first - began;
    node.rate = node.tokens > 1 && seconds > 0 ? (node.tokens - 1) / seconds : null;
    changed();
  }
}

export function Chat({ models }) {
  const [chat] = useState(stored);
  const [, setVersion] = useState(0);
  const [model, setModel] = useState(models[0]);
  const [text, setText] = useState("");
  const [running, setRunning] = useState(null);
  const [editing, setEditing] = useState(null);
  const [showsSettings, setShowsSettings] = useState(false);
  const list = useRef();
  const follows = useRef(true);

  const changed = () => {
    setVersion((version) => version + 1);
    localStorage.setItem(STORE, JSON.stringify(chat));
  };
  useEffect(() => {
    if (follows.current && list.current) list.current.scrollTop = list.current.scrollHeight;
  });
  useEffect(() => () => running?.abort(), [running]);

  async function answer(parentId) {
    const body = requestBody(chat, model, parentId);
    const node = add(chat, parentId, { role: "assistant", content: "", reasoning: "", calls: [], model });
    const abort = new AbortController();
    setRunning(abort);
    follows.current = true;
    changed();
    try {
      await stream(node, body, abort.signal, changed);
    } catch (error) {
      if (error.name === "AbortError") node.finish = "stopped";
      else node.error = error.message;
    }
    setRunning(null);
    changed();
  }

  function send(event) {
    event?.preventDefault();
    if (!text.trim() || running) return;
    const last = branch(chat).at(-1)?.id ?? 0;
    const node = add(chat, last, { role: "user", content: text });
    setText("");
    answer(node.id);
  }

  function saveEdit(node, content) {
    setEditing(null);
    answer(add(chat, node.parent, { role: "user", content }).id);
  }

  function exportChat() {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(chat, null, 1)], { type: "application/json" }));
    link.download = "podway-chat.json";
    link.click();
    URL.revokeObjectURL(link.href);
  }

  async function importChat(event) {
    const [file] = event.target.files;
    event.target.value = "";
    try {
      const found = JSON.parse(await file.text());
      if (!found.nodes || !found.root) throw new Error("this is not an exported chat");
      Object.assign(chat, empty(), found);
      changed();
    } catch (error) {
      alert(`${file.name} cannot be imported: ${error.message}`);
    }
  }

  const shown = branch(chat);
  return html`
    <div class="bar">
      <label class="row">Model
        <select value=${model} onChange=${(event) => setModel(event.target.value)}>
          ${models.map((name) => html`<option value=${name} selected=${name === model}>${name}</option>`)}
        </select></label>
      <button aria-expanded=${showsSettings} onClick=${() => setShowsSettings(!showsSettings)}>Settings</button>
      <button onClick=${() => { Object.assign(chat, empty(), { settings: chat.settings, system: chat.system }); changed(); }}
        disabled=${running}>New chat</button>
      <button onClick=${exportChat}>Export</button>
      <label class="button">Import<input class="hidden-file" type="file" accept="application/json" onChange=${importChat} /></label>
    </div>
    ${showsSettings && html`<${Settings} chat=${chat} changed=${changed} />`}
    <section class="messages" ref=${list} aria-label="Conversation" aria-live="polite" aria-busy=${!!running} tabindex="0"
      onScroll=${(event) => {
        const { scrollTop, scrollHeight, clientHeight } = event.target;
        follows.current = scrollHeight - scrollTop - clientHeight < 40;
      }}>
      ${shown.map((node) => html`<${Message} key=${node.id} node=${node} chat=${chat} changed=${changed}
        running=${running} editing=${editing === node.id} onEdit=${setEditing} onSave=${saveEdit}
        onRegenerate=${() => answer(node.parent)} />`)}
    </section>
    <form class="composer" onSubmit=${send}>
      <textarea aria-label="Message" placeholder="Message" rows="2" value=${text}
        onInput=${(event) => setText(event.target.value)}
        onKeyDown=${(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
        }}></textarea>
      ${running
        ? html`<button type="button" class="primary" id="stop" onClick=${() => running.abort()}>Stop</button>`
        : html`<button type="submit" class="primary" id="send" disabled=${!text.trim()}>Send</button>`}
    </form>`;
}

function Settings({ chat, changed }) {
  return html`<div class="settings">
    <label class="wide">System prompt
      <textarea rows="2" value=${chat.system} onInput=${(event) => { chat.system = event.target.value; changed(); }}></textarea>
    </label>
    ${Object.entries(SETTINGS).map(([name, { label, ...limits }]) => html`<label>${label}
      <input type="number" ...${limits} placeholder="default" value=${chat.settings[name] ?? ""}
        onInput=${(event) => { chat.settings[name] = event.target.value; changed(); }} /></label>`)}
  </div>`;
}

function Branches({ node, chat, changed, disabled }) {
  const parent = at(chat, node.parent);
  const count = parent.children.length;
  if (count < 2) return null;
  const choose = (step) => { parent.chosen = (parent.chosen + step + count) % count; changed(); };
  return html`<span role="group" aria-label="Branches">
    <button aria-label="Previous branch" disabled=${disabled} onClick=${() => choose(-1)}>‹</button>
    <span class="soft branch"> ${parent.chosen + 1} / ${count} </span>
    <button aria-label="Next branch" disabled=${disabled} onClick=${() => choose(1)}>›</button></span>`;
}

function Message({ node, chat, changed, running, editing, onEdit, onSave, onRegenerate }) {
  const [draft, setDraft] = useState(node.content);
  const isUser = node.role === "user";
  if (editing)
    return html`<article class="message user"><textarea aria-label="Edit message" rows="3" value=${draft}
        onInput=${(event) => setDraft(event.target.value)}></textarea>
      <div class="actions"><button class="primary" onClick=${() => onSave(node, draft)}>Send edit</button>
        <button onClick=${() => onEdit(null)}>Cancel</button></div></article>`;
  return html`<article class="message ${node.role}">
    <div class="who">${isUser ? "You" : node.model}</div>
    ${node.reasoning && html`<details><summary>Reasoning</summary>${markdown(node.reasoning)}</details>`}
    <div class="body">${isUser ? node.content : markdown(node.content)}</div>
    ${(node.calls || []).map((each) => html`<pre class="tool" tabindex="0"><code>${each.name}(${each.arguments})</code></pre>`)}
    ${node.error && html`<p class="error" role="alert">${node.error}</p>`}
    <div class="actions">
      <${Branches} node=${node} chat=${chat} changed=${changed} disabled=${!!running} />
      ${isUser
        ? html`<button disabled=${!!running} onClick=${() => onEdit(node.id)}>Edit</button>`
        : html`<button disabled=${!!running} onClick=${onRegenerate}>Regenerate</button>`}
      ${!isUser && html`<${Figures} node=${node} />`}
    </div>
  </article>`;
}

function Figures({ node }) {
  const words = [];
  if (node.ttft) words.push(`first token ${node.ttft.toFixed(0)} ms`);
  if (node.rate) words.push(`${node.rate.toFixed(1)} tokens/s`);
  if (node.tokens) words.push(`${node.tokens} tokens`);
  if (node.finish && node.finish !== "stop") words.push(node.finish);
  return html`<span class="soft figures">${words.join(" · ")}
    ${node.request && html` · <a href="#request/${encodeURIComponent(node.request)}">timeline</a>`}</span>`;
}
