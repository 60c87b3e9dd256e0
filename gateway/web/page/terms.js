// What the words of the engine view mean: tooltips, and a list for keyboards and touch screens.

import { html } from "/page/vendor/htm-preact.js";

export const TERMS = {
  iteration: "One pass of the model over a batch. Requests join and leave between two iterations.",
  running: "Requests that hold KV blocks and are computed in iterations.",
  waiting: "Requests in the queue: not started, or preempted and to be computed again.",
  swapped: "Requests whose KV blocks are kept in host memory until there is room on the device again.",
  "tokens/s": "Output tokens of the last second.",
  "loop lag ms": "How late the server's event loop is. More than a few milliseconds slows all streams.",
  worker: "The process that computes iterations.",
  "worker restarts": "Workers that died and were replaced. Their requests were computed again.",
  prefill: "Computing the tokens of a prompt, several in one iteration.",
  decode: "Computing one output token in an iteration.",
  "KV block": "The keys and values of a few tokens. A request needs blocks for all its tokens.",
  held: "Blocks of live requests.",
  cached: "Prompt tokens or blocks of ended requests that a request with the same beginning reuses.",
  moving: "Blocks that are being copied between device and host.",
  computed: "Tokens whose keys and values are in the KV cache.",
  preempted: "How often the request lost its KV blocks to a more urgent one.",
  level: "Queues of the policy mlfq. Requests in level 0 run first; a request moves down as it uses up its quantum.",
};

export function Terms() {
  return html`<details class="terms"><summary>What do these words mean?</summary>
    <dl>${Object.entries(TERMS).map(([name, text]) => html`<dt>${name}</dt><dd>${text}</dd>`)}</dl></details>`;
}
