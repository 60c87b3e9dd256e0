// A message: its text, reasoning, tool calls and attachments, and what can be done with it.

import { html, useLayoutEffect, useRef, useState } from "/page/vendor/htm-preact.js";
import { CopyButton } from "/page/copy.js";
import { Attachments } from "/page/chat/attachments.js";
import { at } from "/page/chat/conversation.js";
import { Figures } from "/page/chat/figures.js";
import { Calls } from "/page/chat/tools.js";
import { Markdown } from "/page/markdown/markdown.js";

function Branches({ node, conversation, onChange, disabled }) {
  const parent = at(conversation, node.parent);
  const count = parent.children.length;
  if (count < 2) return null;
  const choose = (step) => { parent.chosen = (parent.chosen + step + count) % count; onChange(); };
  return html`<span role="group" aria-label="Branches">
    <button aria-label="Previous branch" disabled=${disabled} onClick=${() => choose(-1)}>‹</button>
    <span class="soft branch"> ${parent.chosen + 1} / ${count} </span>
    <button aria-label="Next branch" disabled=${disabled} onClick=${() => choose(1)}>›</button></span>`;
}

function Editor({ node, onSave, onCancel }) {
  const [draft, setDraft] = useState(node.content);
  const field = useRef();
  useLayoutEffect(() => field.current.focus(), []); // before the next key
  const onKeyDown = (event) => {
    if (event.key === "Escape") { event.stopPropagation(); onCancel(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); onSave(draft); }
  };
  return html`<article class="message user"><textarea aria-label="Edit message" rows=${Math.min(12, draft.split("\n").length + 1)}
      ref=${field} value=${draft} onInput=${(event) => setDraft(event.target.value)} onKeyDown=${onKeyDown}></textarea>
    <div class="actions"><button class="primary" onClick=${() => onSave(draft)}>Send edit</button>
      <button onClick=${onCancel}>Cancel</button></div></article>`;
}

function Reasoning({ node, isOpen }) {
  if (!node.reasoning) return null;
  return html`<details class="reasoning"><summary>${isOpen && !node.content ? "Reasoning …" : "Reasoning"}</summary>
    <${Markdown} text=${node.reasoning} /></details>`;
}

function Body({ node, isOpen }) {
  if (node.role === "tool") return html`<pre tabindex="0">${node.content}</pre>`;
  return html`<div class="body" dir="auto">${node.content && html`<${Markdown} text=${node.content} />`}
    ${isOpen && !node.content && !node.reasoning && html`<span class="soft">…</span>`}</div>`;
}

const WHO = { user: () => "You", assistant: (node) => node.model, tool: (node) => `Result of ${node.name}` };

// `actions`: onEdit, onSaveEdit, onCancelEdit, onRegenerate, onFork, onChange, onResults.
export function Message({ node, conversation, isLast, isRunning, isEdited, actions }) {
  if (isEdited) return html`<${Editor} node=${node} onSave=${(text) => actions.onSaveEdit(node, text)} onCancel=${actions.onCancelEdit} />`;
  const isOpen = isRunning && isLast;
  const isAnswer = node.role === "assistant";
  return html`<article class="message ${node.role}">
    <div class="who">${WHO[node.role](node)}</div>
    <${Reasoning} node=${node} isOpen=${isOpen} />
    <${Attachments} images=${node.images} files=${node.files} />
    <${Body} node=${node} isOpen=${isOpen} />
    ${isAnswer && html`<${Calls} node=${node} isWaiting=${isLast && !isRunning} onResults=${(results) => actions.onResults(node, results)} />`}
    ${node.error && html`<p class="error" role="alert">${node.error}</p>`}
    <div class="actions">
      <${Branches} node=${node} conversation=${conversation} onChange=${actions.onChange} disabled=${isRunning} />
      ${node.content && html`<${CopyButton} text=${node.content} />`}
      ${node.role === "user" && html`<button disabled=${isRunning} onClick=${() => actions.onEdit(node)}>Edit</button>`}
      ${isAnswer && html`<button disabled=${isRunning} onClick=${() => actions.onRegenerate(node)}>Regenerate</button>
        <button disabled=${isRunning} onClick=${() => actions.onFork(node)} title="A new chat with the messages up to this one">Branch</button>`}
      ${isAnswer && html`<${Figures} node=${node} />`}
    </div>
  </article>`;
}
