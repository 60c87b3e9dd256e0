// The conversations and presets in this browser's IndexedDB. Titles are apart from conversations, which may hold images.

import { empty, isConversation, merge, newId, noteFields, titleOf } from "/page/chat/conversation.js";

const SAVE_MS = 500;
const EARLIER = "podway-chat"; // where the only conversation was stored before there were several

const channel = new BroadcastChannel("podway-conversations");
const listeners = new Set();
channel.onmessage = ({ data }) => refresh(data).catch(() => {}).then(() => tell(data));

function tell(id) {
  for (const listener of listeners) listener(id);
}

function announce(id) {
  channel.postMessage(id);
  tell(null);
}

// Calls `listener` after changes of the list, with the id of a conversation that another tab has changed or null.
export function watch(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

let opened = null;

function database() {
  opened ??= globalThis.idb.openDB("podway", 1, {
    upgrade(db) {
      db.createObjectStore("conversations", { keyPath: "id" });
      db.createObjectStore("titles", { keyPath: "id" });
      db.createObjectStore("presets", { keyPath: "name" });
    },
  }).then(async (db) => {
    await moveEarlier(db);
    return db;
  });
  return opened;
}

async function moveEarlier(db) {
  try {
    const conversation = { ...empty(), ...JSON.parse(localStorage.getItem(EARLIER) ?? "{}"), id: "earlier" };
    if (conversation.next > 1 && isConversation(conversation)) await put(db, conversation);
    localStorage.removeItem(EARLIER);
  } catch {
    // it is not a conversation, and stays where it is
  }
}

// Stores a conversation with what other tabs have stored of it meanwhile.
async function put(db, conversation) {
  const { id } = conversation;
  const work = db.transaction(["conversations", "titles"], "readwrite");
  const stored = await work.objectStore("conversations").get(id);
  if (stored) merge(conversation, stored);
  noteFields(conversation);
  await Promise.all([
    work.objectStore("conversations").put(conversation),
    work.objectStore("titles").put({ id, updated: conversation.updated, title: titleOf(conversation) }),
    work.done,
  ]);
}

// The ids and titles of all conversations, the latest first.
export async function list() {
  const titles = await (await database()).getAll("titles");
  return titles.sort((a, b) => b.updated - a.updated);
}

const known = new Map(); // so that an answer and the view of its conversation change the same object

export async function load(id) {
  if (!known.has(id)) {
    const conversation = await (await database()).get("conversations", id);
    if (!conversation || known.has(id)) return known.get(id);
    noteFields(conversation);
    known.set(id, conversation);
  }
  return known.get(id);
}

// Takes over what another tab has changed.
async function refresh(id) {
  const stored = known.has(id) && (await (await database()).get("conversations", id));
  if (stored && known.has(id)) merge(known.get(id), stored);
}

const unsaved = new Map();
const removed = new Set(); // so that an answer that still ends does not store its conversation again
let timer = null;

// Saves soon: an answer changes its conversation with every token.
export function save(conversation) {
  if (removed.has(conversation.id)) return;
  known.set(conversation.id, conversation);
  unsaved.set(conversation.id, conversation);
  timer ??= setTimeout(() => saveNow().catch(() => {}), SAVE_MS);
}

// Saves all that is not saved. Raises what the browser says if it cannot.
export async function saveNow() {
  clearTimeout(timer);
  timer = null;
  const conversations = [...unsaved.values()];
  unsaved.clear();
  for (const conversation of conversations) {
    await put(await database(), conversation);
    announce(conversation.id);
  }
}

addEventListener("pagehide", () => saveNow().catch(() => {}));

export async function remove(id) {
  removed.add(id);
  unsaved.delete(id);
  known.delete(id);
  const work = (await database()).transaction(["conversations", "titles"], "readwrite");
  await Promise.all([work.objectStore("conversations").delete(id), work.objectStore("titles").delete(id), work.done]);
  announce(id);
}

// Calls `visit` with each stored conversation, one after another: all at once may be large.
async function each(visit) {
  const db = await database();
  for (const id of await db.getAllKeys("conversations")) {
    const conversation = await db.get("conversations", id);
    if (conversation) visit(conversation);
  }
}

// The ids of the conversations that contain all words.
export async function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const ids = new Set();
  await each((conversation) => {
    const texts = Object.values(conversation.nodes).map((node) => node.content);
    const whole = [titleOf(conversation), ...texts].join("\n").toLowerCase();
    if (words.every((word) => whole.includes(word))) ids.add(conversation.id);
  });
  return ids;
}

export async function exportAll() {
  await saveNow();
  const conversations = [];
  await each((conversation) => conversations.push(conversation));
  return { conversations };
}

// Adds exported conversations: one, or all of a browser. Raises an error if they are something else.
export async function importAll(value) {
  const conversations = value?.conversations ?? [value];
  if (!Array.isArray(conversations) || !conversations.every(isConversation)) throw new Error("it is not an exported conversation");
  const db = await database();
  const imported = conversations.map((conversation) => ({ ...empty(), ...conversation, id: newId() }));
  for (const conversation of imported) await put(db, conversation);
  announce(null);
  return imported.map(({ id }) => id);
}

// The latest answers, newest first: their request ids and how they begin.
export async function recentRequests(limit = 10) {
  const answers = [];
  for (const { id } of (await list()).slice(0, limit)) {
    const { nodes } = await load(id);
    answers.push(...Object.values(nodes).filter((node) => node.request).reverse());
  }
  return answers.slice(0, limit).map((node) => ({ id: node.request, text: node.content.slice(0, 60) }));
}

export const presets = {
  list: async () => (await database()).getAll("presets"),
  save: async (preset) => (await database()).put("presets", preset),
  remove: async (name) => (await database()).delete("presets", name),
};
