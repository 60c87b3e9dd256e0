// The chat: one conversation of this browser, beside the list of all.

import { html, useEffect, useErrorBoundary, useLayoutEffect, useRef, useState } from "/page/vendor/htm-preact.js";
import { answer, isRunning, resume, stop, watchAnswers } from "/page/chat/answers.js";
import { Composer } from "/page/chat/composer.js";
import { add, branch, empty, fork } from "/page/chat/conversation.js";
import { load, save, watch } from "/page/chat/database.js";
import { ContextMeter } from "/page/chat/figures.js";
import { Message } from "/page/chat/message.js";
import { ModelPicker } from "/page/chat/models.js";
import { Settings } from "/page/chat/settings.js";
import { Sidebar } from "/page/chat/sidebar.js";

const LATEST = "podway-latest"; // the conversation that this tab showed last
const NEAR_END = 40; // pixels
const WIDE = "(min-width: 60rem)";

function open(conversation) {
  location.hash = `chat/${conversation.id}`;
}

// The conversation that the address names, and a function that shows what has changed in it. A new one takes the
// system prompt and the settings of the one before.
function useConversation(name) {
  const [conversation, setConversation] = useState(null);
  const [, setVersion] = useState(0);
  const show = () => setVersion((version) => version + 1);
  useEffect(() => {
    let isWanted = true;
    async function follow(id) {
      const stored = id && id !== "new" ? await load(id).catch(() => undefined) : undefined;
      if (!isWanted) return;
      setConversation((before) => {
        if (stored || !before) return stored ?? empty();
        const { system, settings, tools, model } = before;
        return { ...empty(), system, settings: { ...settings }, tools, model };
      });
      if (stored) {
        sessionStorage.setItem(LATEST, stored.id);
        resume(stored);
      }
    }
    follow(name || sessionStorage.getItem(LATEST));
    const unwatch = [watchAnswers(show), watch(show)];
    return () => { isWanted = false; unwatch.forEach((end) => end()); };
  }, [name]);
  return [conversation, show];
}

function useShortcuts(actions) {
  useLayoutEffect(() => {
    const onKeyDown = (event) => {
      const isTyping = /^(input|textarea|select)$/i.test(event.target.tagName);
      const name = [(event.ctrlKey || event.metaKey) && "ctrl", event.shiftKey && "shift", event.key.toLowerCase()].filter(Boolean).join(" ");
      if (!Object.hasOwn(actions, name) || event.isComposing || (isTyping && name === "/")) return;
      event.preventDefault();
      actions[name]();
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  });
}

const focus = (id) => document.getElementById(id)?.focus();

function Welcome({ model }) {
  return html`<div class="welcome">
    <h1>Chat with ${model}</h1>
    <p>Chats are stored in this browser. Every answer shows its time to the first token, its tokens per second and what of its prompt was cached.</p>
    <ul>
      <li><a href="#engine">Engine</a> shows iterations, KV blocks and queues live, also those of other clients.</li>
      <li><a href="#request">Request</a> says why a request was slow.</li>
      <li><a href="#replay">Replay</a> shows a recording, and how another policy would have scheduled it.</li>
    </ul></div>`;
}

// The messages; they scroll with an answer unless the reader has scrolled back.
function Messages({ conversation, model, editing, actions }) {
  const list = useRef();
  const follows = useRef(true);
  const [error] = useErrorBoundary();
  useEffect(() => { follows.current = true; }, [conversation]);
  useEffect(() => {
    if (follows.current && list.current) list.current.scrollTop = list.current.scrollHeight;
  });
  if (error) return html`<p class="error messages" role="alert">This chat cannot be shown: ${error.message}</p>`;
  const messages = branch(conversation);
  const running = isRunning(conversation);
  return html`<section class="messages" ref=${list} aria-label="Conversation" aria-live="polite" aria-busy=${running} tabindex="0"
      onScroll=${({ target }) => { follows.current = target.scrollHeight - target.scrollTop - target.clientHeight < NEAR_END; }}>
    ${messages.length === 0 && html`<${Welcome} model=${model} />`}
    ${messages.map((node, place) => html`<${Message} key=${node.id} node=${node} conversation=${conversation} actions=${actions}
      isLast=${place === messages.length - 1} isRunning=${running} isEdited=${editing === node.id} />`)}
  </section>`;
}

// What the buttons and keys of a conversation do.
function actionsOf({ conversation, model, setEditing, show }) {
  const changed = () => { save(conversation); show(); };
  const respond = (parentId) => answer(conversation, parentId, model).then(show);
  const say = (fields, parentId) => {
    const isFirst = conversation.next === 1;
    respond(add(conversation, parentId, { role: "user", ...fields }).id);
    if (isFirst) open(conversation);
  };
  return {
    onChange: changed,
    onSettings: () => { if (conversation.next > 1) save(conversation); show(); },
    onSend: (fields) => say(fields, branch(conversation).at(-1)?.id ?? 0),
    onEdit: (node) => setEditing(node.id),
    onEditLast: () => setEditing(branch(conversation).findLast((node) => node.role === "user")?.id ?? null),
    onCancelEdit: () => setEditing(null),
    onSaveEdit: ({ parent, images, files }, content) => { setEditing(null); say({ content, images, files }, parent); },
    onRegenerate: (node) => respond(node.parent),
    onFork: (node) => { const copy = fork(conversation, node.id); save(copy); open(copy); },
    onResults: (node, results) => {
      let parent = node.id;
      results.forEach((content, place) => {
        const { id, name } = node.calls[place];
        parent = add(conversation, parent, { role: "tool", call: id, name, content }).id;
      });
      respond(parent);
    },
  };
}

export function Chat({ models, reload, argument }) {
  const [conversation, show] = useConversation(argument);
  const [editing, setEditing] = useState(null);
  const [showsSettings, setShowsSettings] = useState(false);
  const [showsList, setShowsList] = useState(matchMedia(WIDE).matches);
  const [failed, setFailed] = useState(null);
  useEffect(() => { if (!matchMedia(WIDE).matches) setShowsList(false); }, [argument]);
  useShortcuts({
    ...(conversation && isRunning(conversation) && { escape: () => stop(conversation) }),
    "ctrl shift o": () => { location.hash = "chat/new"; focus("message"); },
    "ctrl shift s": () => setShowsList(!showsList),
    "ctrl k": () => { setShowsList(true); requestAnimationFrame(() => focus("search")); },
    "/": () => focus("message"),
  });
  if (!conversation) return null;
  const generating = models.filter(({ task }) => task === null || task === "generate");
  const model = generating.find(({ id }) => id === conversation.model) ?? generating[0];
  const actions = actionsOf({ conversation, model: model?.id, setEditing, show });
  return html`
    ${showsList && html`<${Sidebar} current=${conversation.id} onError=${setFailed} onHide=${() => setShowsList(false)}
      onDelete=${() => { stop(conversation); sessionStorage.removeItem(LATEST); location.hash = "chat/new"; }} />`}
    <div class="conversation">
      <div class="bar">
        <button aria-expanded=${showsList} onClick=${() => setShowsList(!showsList)}>Chats</button>
        <${ModelPicker} models=${generating} model=${model} reload=${reload}
          onModel=${(id) => { conversation.model = id; actions.onSettings(); }} />
        <button aria-expanded=${showsSettings} onClick=${() => setShowsSettings(!showsSettings)}>Settings</button>
        <${ContextMeter} conversation=${conversation} model=${model} />
      </div>
      ${failed && html`<p class="error bar" role="alert">${failed}</p>`}
      ${showsSettings && html`<${Settings} key=${conversation.id} conversation=${conversation} onChange=${actions.onSettings} />`}
      <${Messages} key=${conversation.id} conversation=${conversation} model=${model?.id} editing=${editing} actions=${actions} />
      <${Composer} isRunning=${isRunning(conversation)} onSend=${actions.onSend} onStop=${() => stop(conversation)}
        onEditLast=${actions.onEditLast} onError=${setFailed} />
    </div>`;
}
