// The figures below an answer, why it was slow, and how much of the context a conversation fills.

import { html, useState } from "/page/vendor/htm-preact.js";
import { timelineOf } from "/page/chat/answers.js";
import { branch } from "/page/chat/conversation.js";

const FINISHES = { length: "cut off by max tokens", tool_calls: "called a tool" };
const number = (value) => value.toLocaleString("en");

function wordsOf(node) {
  const words = [];
  if (node.ttft) words.push(`first token ${node.ttft.toFixed(0)} ms`);
  if (node.rate) words.push(`${node.rate.toFixed(1)} tokens/s`);
  if (node.tokens) words.push(`${number(node.tokens)} tokens`);
  if (node.prompt) words.push(`prompt ${number(node.prompt)}${node.cached ? `, ${Math.round((100 * node.cached) / node.prompt)} % cached` : ""}`);
  if (node.finish && node.finish !== "stop") words.push(FINISHES[node.finish] ?? node.finish);
  if (node.freed) words.push(`${number(node.freed)} KV slots freed`);
  return words.join(" · ");
}

export function Figures({ node }) {
  const [why, setWhy] = useState(null);
  const explain = () => timelineOf(node).then(({ explanation }) => setWhy(explanation), (error) => setWhy(error.message));
  return html`<span class="soft figures">${wordsOf(node)}
    ${node.request && html` · <a href="#request/${encodeURIComponent(node.request)}">timeline</a>
      ${" "}<button type="button" onClick=${explain}>Why slow?</button>`}
    ${why && html`<span class="why" role="status">${why}</span>`}</span>`;
}

export function ContextMeter({ conversation, model }) {
  const last = branch(conversation).findLast((node) => node.tokens);
  const total = model?.max_model_len;
  if (!last || !total) return null;
  const used = last.prompt + last.tokens;
  return html`<span class="context soft"><meter min="0" max=${total} high=${0.85 * total} value=${used} aria-label="Context used"></meter>
    ${number(used)} of ${number(total)} tokens of context</span>`;
}
