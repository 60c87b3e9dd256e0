// Answers as they are generated. The server holds each under a name of its own, so that this page can be
// reloaded, or lose its network, while it is read.

import { ApiError, call, events, json } from "/page/api.js";
import { contentOf } from "/page/chat/attachments.js";
import { add, branch, claim, newId } from "/page/chat/conversation.js";
import { save, saveNow } from "/page/chat/database.js";

const MAX_RETRIES = 120; // of what had begun: a server that is started again loads its model first
const MAX_UNSENT = 5; // of what the server may not have received
const RETRY_MS = 1000;
const SHOW_MS = 100; // between two times that a growing answer is shown
const STOP_MS = 50;
const CANCELLED = ["request_cancelled", 499]; // by another tab
const MIN_SECONDS = 0.05; // from which on the times of events say how fast tokens come
const running = new Map(); // by the id of a conversation: the answer, and what stops reading it
const listeners = new Set();
let isDue = false;

// Calls `listener` while answers grow.
export function watchAnswers(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function changed(conversation) {
  save(conversation);
  if (isDue) return;
  isDue = true;
  setTimeout(() => {
    isDue = false;
    for (const listener of listeners) listener();
  }, SHOW_MS);
}

const pause = (milliseconds) => new Promise((resume) => setTimeout(resume, milliseconds));

const lastOf = (conversation) => branch(conversation).at(-1);
const isOpen = (node) => node?.role === "assistant" && Boolean(node.stream && !node.finish && !node.error);

// Whether an answer is generated, also one that another tab reads: nothing is sent below a part of an answer.
export const isRunning = (conversation) => running.has(conversation.id) || isOpen(lastOf(conversation));

function messageOf(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.call, content: node.content };
  const message = { role: node.role, content: contentOf(node) };
  if (!node.calls?.length) return message;
  const calls = node.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { ...message, tool_calls: calls };
}

function settingsOf({ settings, tools }) {
  const fields = {};
  for (const [name, value] of Object.entries(settings)) {
    if (value === "") continue;
    fields[name] = name === "stop" ? String(value).split("\n").filter(Boolean) : Number(value);
  }
  if (tools?.trim()) fields.tools = JSON.parse(tools);
  return fields;
}

function bodyOf(conversation, model, lastId) {
  const messages = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  for (const node of branch(conversation)) {
    if (node.content || node.role !== "assistant" || node.calls?.length) messages.push(messageOf(node));
    if (node.id === lastId) break;
  }
  const usage = { include_usage: true, continuous_usage_stats: true };
  return { model, messages, stream: true, stream_options: usage, ...settingsOf(conversation) };
}

function readDelta(node, delta) {
  node.content += delta.content || "";
  node.reasoning += delta.reasoning_content || delta.reasoning || "";
  for (const { index, id, function: part } of delta.tool_calls || []) {
    const call = (node.calls[index] ||= { id: "", name: "", arguments: "" });
    call.id ||= id || "";
    call.name += part?.name || "";
    call.arguments += part?.arguments || "";
  }
}

function readUsage(node, usage) {
  node.tokens = usage.completion_tokens;
  node.prompt = usage.prompt_tokens;
  node.cached = usage.prompt_tokens_details?.cached_tokens ?? node.cached;
}

// Reads all events of an answer, from the first on.
async function read(conversation, node, response, began) {
  Object.assign(node, { content: "", reasoning: "", calls: [], ttft: null, rate: null });
  let first = null;
  for await (const event of events(response)) {
    if (event.error) throw new ApiError(event.error.code, event.error.message);
    const choice = event.choices?.[0];
    if (choice) {
      readDelta(node, choice.delta);
      node.finish = choice.finish_reason || node.finish;
      if (node.content || node.reasoning || node.calls.length) first ??= performance.now();
    }
    if (event.usage) readUsage(node, event.usage);
    if (began !== null && first !== null) {
      const seconds = (performance.now() - first) / 1000;
      node.ttft = first - began;
      node.rate = node.tokens > 1 && seconds > MIN_SECONDS ? (node.tokens - 1) / seconds : null;
    }
    changed(conversation);
  }
  if (!node.finish) throw new TypeError("the stream ended early");
  if (!node.rate) node.rate = await rateOf(node).catch(() => null);
}

// Tokens per second of decoding, from the timeline of an answer whose events have come at once.
async function rateOf(node) {
  const [choice] = (await timelineOf(node)).choices;
  const decodes = choice.spans.filter(({ phase }) => phase === "decode");
  const seconds = decodes.reduce((sum, span) => sum + span.seconds, 0);
  return seconds > 0 ? choice.completion_tokens / seconds : null;
}

const streamPath = (node) => `/v1/stream/${encodeURIComponent(node.stream)}`;
// A server that ends says "unavailable" (503); the one after it goes on with the answer.
const isLost = (error) => error instanceof TypeError || error.status === "unavailable" || error.status === 503;

// Reads the held stream of an answer. The times of its events are not known.
async function readAgain(conversation, node, signal, retries = MAX_RETRIES) {
  for (let retry = 1; ; retry += 1) {
    try {
      return await read(conversation, node, await call(streamPath(node), { signal }), null);
    } catch (error) {
      if (!isLost(error) || retry > retries) throw error;
      await pause(RETRY_MS);
    }
  }
}

async function generate(conversation, node, body, signal) {
  const began = performance.now();
  const headers = { "x-conversation-id": node.stream, "x-request-id": node.request };
  let retries = MAX_UNSENT;
  try {
    const response = await call("/v1/chat/completions", { method: "POST", body, signal, headers });
    retries = MAX_RETRIES;
    await read(conversation, node, response, began);
  } catch (error) {
    if (!isLost(error)) throw error;
    await readAgain(conversation, node, signal, retries).catch((again) => { throw again.status === 404 ? error : again; });
  }
}

// Has `work` fill an answer, and notes how it ended.
async function follow(conversation, node, work) {
  const abort = new AbortController();
  running.set(conversation.id, { node, abort });
  claim(node);
  changed(conversation);
  try {
    await saveNow().catch(() => {}); // so that a reload finds the name of its stream
    await work(abort.signal);
  } catch (error) {
    if (error.name === "AbortError" || CANCELLED.includes(error.status)) node.finish = "stopped";
    else node.error = error.message;
  }
  running.delete(conversation.id);
  changed(conversation);
  if (node.finish === "stopped") {
    node.freed = await freedSlots(node).catch(() => null);
    changed(conversation);
  }
}

// Adds an answer to a message, and generates it.
export function answer(conversation, parentId, model) {
  const node = add(conversation, parentId, { role: "assistant", content: "", reasoning: "", calls: [], model });
  Object.assign(node, { stream: `page:${conversation.id}:${node.id}`, request: `page_${newId()}` }); // known before it is sent
  return follow(conversation, node, (signal) => generate(conversation, node, bodyOf(conversation, model, parentId), signal));
}

// Goes on reading the answer that was not complete when the page was left.
export function resume(conversation) {
  const node = lastOf(conversation);
  if (isOpen(node) && !running.has(conversation.id)) follow(conversation, node, (signal) => readAgain(conversation, node, signal));
}

// Stops reading an answer, and has the server end it. The server may not know it yet, so this asks a few times.
export async function stop(conversation) {
  const { node, abort } = running.get(conversation.id) ?? { node: lastOf(conversation) };
  if (abort) abort.abort();
  else if (!isOpen(node)) return;
  else {
    claim(node);
    node.finish = "stopped";
    changed(conversation);
  }
  for (let attempt = 0; attempt < 3; attempt += 1) {
    const error = await call(streamPath(node), { method: "DELETE" }).catch((failure) => failure);
    if (error.status !== 404) return;
    await pause(STOP_MS);
  }
}

export const timelineOf = (node) => json(`/v1/requests/${encodeURIComponent(node.request)}/timeline`);

// After a stop: how many KV slots its request freed. The server ends it between two iterations, so this asks a few times.
async function freedSlots(node) {
  for (let attempt = 0; attempt < 10; attempt += 1) {
    const { choices } = await timelineOf(node);
    if (choices.every((choice) => choice.ended))
      return choices.reduce((sum, choice) => sum + choice.prompt_tokens + choice.completion_tokens, 0);
    await pause(STOP_MS);
  }
  return null;
}
