// A conversation: a tree of messages, in which editing a message or regenerating an answer adds a branch.

import { isImage } from "/page/chat/attachments.js";

const MAX_TITLE = 60;
const ID_STEP = 2 ** 30; // two tabs that add a message at once give it different ids
const FIELDS = ["title", "model", "system", "settings", "tools"];
const ROLES = ["user", "assistant", "tool"];

export const newId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export const empty = () => ({
  id: newId(), title: "", updated: Date.now(), model: "", system: "", settings: {}, tools: "",
  nodes: {}, root: { children: [], chosen: 0 }, next: 1,
});

const isText = (value) => (value ?? "") === String(value ?? "");
const isNumber = (value) => Number.isFinite(value ?? 0);
const isOptionalList = (value, isEntry) => value === undefined || (Array.isArray(value) && value.every(isEntry));

function isNode(nodes, node, id) {
  const isCall = (call) => typeof call?.name === "string" && typeof call.arguments === "string";
  const isFile = (file) => typeof file?.name === "string" && typeof file.text === "string";
  return isBranching(nodes, node, id) && node.id === id && ROLES.includes(node.role)
    && typeof node.content === "string" && [node.reasoning, node.error, node.model].every(isText)
    && [node.ttft, node.rate, node.tokens, node.prompt, node.cached, node.freed].every(isNumber)
    && [node.stream, node.request, node.finish, node.name, node.call].every(isText)
    && isOptionalList(node.images, isImage) && isOptionalList(node.files, isFile) && isOptionalList(node.calls, isCall);
}

// Whether a node's children are nodes that were added after it, so that no branch is endless.
const isBranching = (nodes, node, id) =>
  Array.isArray(node?.children) && node.children.every((child) => child > id && nodes[child]?.parent === id)
  && Number.isInteger(node.chosen) && (node.children.length === 0 || node.chosen in node.children);

// Whether a value, such as an imported one, has the form of a conversation.
export function isConversation(value) {
  const { nodes, root, settings, next } = value ?? {};
  const isObject = (each) => typeof each === "object" && each !== null && !Array.isArray(each);
  return isObject(nodes) && isBranching(nodes, root, 0)
    && isObject(settings) && Object.values(settings).every((each) => isText(each) || isNumber(each))
    && Object.entries(nodes).every(([id, node]) => Number(id) < next && isNode(nodes, node, Number(id)))
    && [value.title, value.system, value.model, value.tools].every(isText);
}

export const at = (conversation, id) => (id === 0 ? conversation.root : conversation.nodes[id]);

// The messages of the chosen branch, from the first on.
export function branch(conversation) {
  const messages = [];
  for (let node = conversation.root; node.children.length; ) {
    node = conversation.nodes[node.children[node.chosen]];
    messages.push(node);
  }
  return messages;
}

export function add(conversation, parentId, fields) {
  const id = conversation.next + Math.floor(Math.random() * ID_STEP);
  conversation.next = id + 1;
  const node = { id, parent: parentId, children: [], chosen: 0, ...fields };
  conversation.nodes[node.id] = node;
  const parent = at(conversation, parentId);
  parent.chosen = parent.children.push(node.id) - 1;
  conversation.updated = Date.now();
  return node;
}

// A conversation of its own with the chosen branch up to a message.
export function fork(conversation, lastId) {
  const { model, system, settings, tools } = conversation;
  const copy = { ...empty(), title: `${titleOf(conversation)} (branch)`, model, system, settings: { ...settings }, tools };
  let parent = 0;
  for (const node of branch(conversation)) {
    const { id, parent: _, children, chosen, ...fields } = structuredClone(node);
    parent = add(copy, parent, fields).id;
    if (id === lastId) break;
  }
  return copy;
}

// The given title, or how the first message begins.
export function titleOf(conversation) {
  const [first] = branch(conversation);
  const words = first?.content.trim().replace(/\s+/g, " ").slice(0, MAX_TITLE);
  return conversation.title || words || "New chat";
}

const claimed = new WeakSet(); // the answers that this tab reads from the server
const bases = new WeakMap(); // by conversation: its fields when it was last read or stored

export const claim = (node) => claimed.add(node);

export const noteFields = (conversation, values = conversation) =>
  bases.set(conversation, structuredClone(Object.fromEntries(FIELDS.map((name) => [name, values[name]]))));

function mergeNode(own, other) {
  const added = other.children.filter((child) => !own.children.includes(child));
  const chosen = own.children.length ? own.chosen : other.chosen;
  return Object.assign(own, !claimed.has(own) && other, { children: [...own.children, ...added], chosen });
}

// Adds what another tab has stored. This tab keeps the branch that it shows, the answers that it reads and the
// fields that it has changed.
export function merge(conversation, stored) {
  const { nodes } = conversation;
  for (const [id, node] of Object.entries(stored.nodes)) nodes[id] = nodes[id] ? mergeNode(nodes[id], node) : node;
  mergeNode(conversation.root, stored.root);
  for (const name of ["next", "updated"]) conversation[name] = Math.max(conversation[name], stored[name]);
  const base = bases.get(conversation) ?? {};
  const isOwn = (name) => JSON.stringify(conversation[name]) !== JSON.stringify(base[name]);
  for (const name of FIELDS) if (!isOwn(name)) conversation[name] = stored[name];
  noteFields(conversation, stored);
}
