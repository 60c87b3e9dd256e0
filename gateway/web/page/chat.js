// The chat: messages, branches, settings. Conversations are stored in this browser only.

import { html, useEffect, useRef, useState } from "/page/vendor/htm-preact.js";
import { call, events, json } from "/page/api.js";
import { contentOf, imageFiles, Pictures, readImages } from "/page/images.js";
import { markdown } from "/page/markdown.js";
import { add, at, branch, empty, isChat, save, stored } from "/page/store.js";

const FINISHES = { length: "cut off by max tokens", tool_calls: "called a tool" };
const SETTINGS = {
  temperature: { label: "Temperature", min: 0, max: 2, step: 0.1 },
  top_p: { label: "Top-p", min: 0, max: 1, step: 0.05 },
  max_tokens: { label: "Max tokens", min: 1, step: 1 },
  seed: { label: "Seed", step: 1 },
};

function requestBody(chat, model, upTo) {
  const messages = chat.system ? [{ role: "system", content: chat.system }] : [];
  for (const node of branch(chat)) {
    if (node.content || node.role === "user") messages.push({ role: node.role, content: contentOf(node) });
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

// After a stop: how many KV slots its request freed, from its timeline. The server ends the request
// when it receives the disconnect, so this asks a few times.
async function freedSlots(requestId) {
  for (let attempt = 0; attempt < 10; attempt += 1) {
    const { choices } = await json(`/v1/requests/${encodeURIComponent(requestId)}/timeline`);
    if (choices.every((choice) => choice.ended))
      return choices.reduce((sum, choice) => sum + choice.prompt_tokens + choice.completion_tokens, 0);
    await new Promise((resume) => setTimeout(resume, 50));
  }
  return null;
}

export function Chat({ models }) {
  const [chat] = useState(stored);
  const [, setVersion] = useState(0);
  const [model, setModel] = useState(models[0]);
  const [text, setText] = useState("");
  const [images, setImages] = useState([]);
  const [running, setRunning] = useState(null);
  const [editing, setEditing] = useState(null);
  const [showsSettings, setShowsSettings] = useState(false);
  const [failed, setFailed] = useState(null);
  const list = useRef();
  const follows = useRef(true);

  const changed = () => {
    setVersion((version) => version + 1);
    save(chat);
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
    if (node.finish === "stopped" && node.request) {
      node.freed = await freedSlots(node.request).catch(() => null);
      changed();
    }
  }

  function send(event) {
    event?.preventDefault();
    if (isEmpty || running) return;
    const last = branch(chat).at(-1)?.id ?? 0;
    const node = add(chat, last, { role: "user", content: text, images });
    setText("");
    setImages([]);
    answer(node.id);
  }

  function saveEdit(node, content) {
    setEditing(null);
    answer(add(chat, node.parent, { role: "user", content, images: node.images }).id);
  }

  async function attach(files) {
    try {
      const added = await readImages(files);
      setImages((before) => [...before, ...added]);
      setFailed(null);
    } catch (error) {
      setFailed(error.message);
    }
  }

  function takeImages(event, transfer) {
    const files = imageFiles(transfer);
    if (!files.length) return;
    event.preventDefault();
    attach(files);
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
      if (!isChat(found)) throw new Error("this is not an exported chat");
      Object.assign(chat, empty(), found);
      setFailed(null);
      changed();
    } catch (error) {
      setFailed(`${file.name} cannot be imported: ${error.message}`);
    }
  }

  const shown = branch(chat);
  const isEmpty = !text.trim() && !images.length;
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
    ${failed && html`<p class="error bar" role="alert">${failed}</p>`}
    ${showsSettings && html`<${Settings} chat=${chat} changed=${changed} />`}
    <section class="messages" ref=${list} aria-label="Conversation" aria-live="polite" aria-busy=${!!running} tabindex="0"
      onScroll=${(event) => {
        const { scrollTop, scrollHeight, clientHeight } = event.target;
        follows.current = scrollHeight - scrollTop - clientHeight < 40;
      }}>
      ${shown.length === 0 && html`<${Welcome} model=${model} />`}
      ${shown.map((node) => html`<${Message} key=${node.id} node=${node} chat=${chat} changed=${changed}
        running=${running} editing=${editing === node.id} onEdit=${setEditing} onSave=${saveEdit}
        onRegenerate=${() => answer(node.parent)} />`)}
    </section>
    <form class="composer" onSubmit=${send} onDragOver=${(event) => event.preventDefault()}
      onDrop=${(event) => takeImages(event, event.dataTransfer)}>
      <${Pictures} images=${images} onRemove=${(place) => setImages(images.toSpliced(place, 1))} />
      <textarea aria-label="Message" placeholder="Message" rows="2" value=${text}
        onPaste=${(event) => takeImages(event, event.clipboardData)}
        onInput=${(event) => setText(event.target.value)}
        onKeyDown=${(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
        }}></textarea>
      <label class="button">Image<input class="hidden-file" type="file" accept="image/*" multiple
        onChange=${(event) => { attach([...event.target.files]); event.target.value = ""; }} /></label>
      ${running
        ? html`<button type="button" class="primary" id="stop" onClick=${() => running.abort()}>Stop</button>`
        : html`<button type="submit" class="primary" id="send" disabled=${isEmpty}>Send</button>`}
    </form>`;
}

function Welcome({ model }) {
  return html`<div class="welcome">
    <h1>Chat with ${model}</h1>
    <p>Messages stay in this browser. Every answer shows its time to the first token and its tokens per second.</p>
    <ul>
      <li><a href="#engine">Engine</a> shows iterations, KV blocks and queues live, also those of other clients.</li>
      <li><a href="#request">Request</a> says why a request was slow.</li>
      <li><a href="#replay">Replay</a> shows a recording, and how another policy would have scheduled it.</li>
    </ul></div>`;
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
    <${Pictures} images=${node.images} />
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
  if (node.finish && node.finish !== "stop") words.push(FINISHES[node.finish] ?? node.finish);
  if (node.freed) words.push(`${node.freed} KV slots freed`);
  return html`<span class="soft figures">${words.join(" · ")}
    ${node.request && html` · <a href="#request/${encodeURIComponent(node.request)}">timeline</a>`}</span>`;
}
