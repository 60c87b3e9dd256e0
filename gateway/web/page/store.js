// The chat as it is stored in this browser: a tree of messages, in which editing a message or
// regenerating an answer adds a branch.

import { isImage } from "/page/images.js";

const STORE = "podway-chat";
const SAVE_MS = 500;

export const empty = () => ({ nodes: {}, root: { children: [], chosen: 0 }, system: "", settings: {}, next: 1 });

export function stored() {
  flush();
  try {
    const found = JSON.parse(localStorage.getItem(STORE));
    return isChat(found) ? found : empty();
  } catch {
    return empty();
  }
}

// Whether a value, such as an imported file, has the form of a chat.
export function isChat(value) {
  const isList = (node) => Array.isArray(node?.children) && node.children.every((id) => value.nodes[id]);
  return !!value && typeof value.nodes === "object" && value.nodes !== null && isList(value.root)
    && Object.values(value.nodes).every((node) => isList(node) && typeof node.content === "string"
      && (node.images === undefined || (Array.isArray(node.images) && node.images.every(isImage))));
}

let unsaved = null;
let timer = null;

function flush() {
  clearTimeout(timer);
  timer = null;
  if (!unsaved) return;
  try {
    localStorage.setItem(STORE, JSON.stringify(unsaved));
  } catch {
    // the browser's storage is full: the chat stays usable until the tab is closed
  }
  unsaved = null;
}

addEventListener("pagehide", flush);

// Saves soon: an answer changes the chat with every token.
export function save(chat) {
  unsaved = chat;
  timer ??= setTimeout(flush, SAVE_MS);
}

export const at = (chat, id) => (id === 0 ? chat.root : chat.nodes[id]);

// The messages of the chosen branch, from the first on.
export function branch(chat) {
  const found = [];
  for (let node = chat.root; node.children.length; ) {
    node = chat.nodes[node.children[node.chosen]];
    found.push(node);
  }
  return found;
}

export function add(chat, parentId, fields) {
  const node = { id: chat.next++, parent: parentId, children: [], chosen: 0, ...fields };
  chat.nodes[node.id] = node;
  const parent = at(chat, parentId);
  parent.chosen = parent.children.push(node.id) - 1;
  return node;
}

// The latest answers, newest first: their request ids and how they begin.
export function recentRequests(limit = 10) {
  const answers = Object.values(stored().nodes).filter((node) => node.request);
  return answers.sort((a, b) => b.id - a.id).slice(0, limit)
    .map((node) => ({ id: node.request, text: node.content.slice(0, 60) }));
}
