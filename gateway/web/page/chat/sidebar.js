// The conversations of this browser: searched, renamed, deleted, exported and imported.

import { html, useEffect, useLayoutEffect, useRef, useState } from "/page/vendor/htm-preact.js";
import { exportAll, importAll, list, load, remove, save, saveNow, search, watch } from "/page/chat/database.js";

const SHORTCUTS = {
  Enter: "send", "Shift Enter": "new line", Esc: "stop", "↑": "in an empty message: edit the last one", "Ctrl Shift O": "new chat",
  "Ctrl K": "search chats", "Ctrl Shift S": "show or hide chats", "/": "write a message",
};

function download(value, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
  link.download = `${name}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

// Changes a stored conversation, and saves it at once.
async function rename(id, title) {
  const conversation = await load(id);
  conversation.title = title.trim();
  save(conversation);
  await saveNow();
}

function TitleForm({ entry, onEnd }) {
  const [title, setTitle] = useState(entry.title);
  const field = useRef();
  useLayoutEffect(() => { field.current.focus(); field.current.select(); }, []);
  const submit = (event) => { event.preventDefault(); rename(entry.id, title).then(onEnd); };
  return html`<form onSubmit=${submit}>
    <input aria-label="Title" ref=${field} value=${title} onInput=${(event) => setTitle(event.target.value)}
      onKeyDown=${(event) => event.key === "Escape" && onEnd()} /><button class="small">Save</button></form>`;
}

function Entry({ entry, isCurrent, onDelete }) {
  const [isRenamed, setIsRenamed] = useState(false);
  const { id, title } = entry;
  if (isRenamed) return html`<li class="entry"><${TitleForm} entry=${entry} onEnd=${() => setIsRenamed(false)} /></li>`;
  return html`<li class="entry"><a href="#chat/${id}" aria-current=${isCurrent ? "true" : null} title=${title}>${title}</a>
    ${isCurrent && html`<div class="actions">
      <button onClick=${() => setIsRenamed(true)}>Rename</button>
      <button onClick=${() => load(id).then((conversation) => download(conversation, "podway-chat"))}>Export</button>
      <button onClick=${() => confirm(`Delete “${title}”?`) && onDelete(id)}>Delete</button></div>`}</li>`;
}

// The titles, and whether the browser stores conversations; both follow changes, also those of other tabs.
function useTitles() {
  const [titles, setTitles] = useState([]);
  const [error, setError] = useState(null);
  useEffect(() => {
    const refresh = () => list().then(setTitles, () => setError("This browser stores no chats: they end with this tab."));
    refresh();
    return watch(refresh);
  }, []);
  return [titles, error];
}

function useSearch(titles) {
  const [words, setWords] = useState("");
  const [ids, setIds] = useState(null);
  useEffect(() => {
    let isLatest = true;
    if (!words.trim()) setIds(null);
    else search(words).then((found) => isLatest && setIds(found), () => {});
    return () => { isLatest = false; };
  }, [words, titles]);
  return [words, setWords, ids === null ? titles : titles.filter(({ id }) => ids.has(id))];
}

async function importFile(event, onError) {
  const [file] = event.target.files;
  event.target.value = "";
  try {
    const [first] = await importAll(JSON.parse(await file.text()));
    if (first) location.hash = `chat/${first}`;
    onError(null);
  } catch (error) {
    onError(`${file.name} cannot be imported: ${error.message}`);
  }
}

export function Sidebar({ current, onDelete, onHide, onError }) {
  const [titles, notStored] = useTitles();
  const [words, setWords, shown] = useSearch(titles);
  return html`<aside class="sidebar" aria-label="Chats">
    <div class="actions"><a class="button" href="#chat/new">New chat</a><button class="hide" onClick=${onHide}>Hide</button></div>
    <input type="search" id="search" aria-label="Search chats" placeholder="Search chats" value=${words} onInput=${(event) => setWords(event.target.value)} />
    ${notStored && html`<p class="error" role="alert">${notStored}</p>`}
    <ul class="entries">${shown.map((entry) => html`<${Entry} key=${entry.id} entry=${entry} isCurrent=${entry.id === current}
      onDelete=${(id) => remove(id).then(() => onDelete(id), (error) => onError(error.message))} />`)}</ul>
    ${words && !shown.length && html`<p class="soft">No chat has these words.</p>`}
    <div class="actions"><button onClick=${() => exportAll().then((value) => download(value, "podway-chats"), (error) => onError(error.message))}>Export all</button>
      <label class="button small">Import<input class="hidden-file" type="file" accept="application/json,.json" onChange=${(event) => importFile(event, onError)} /></label></div>
    <details class="shortcuts"><summary>Keys</summary><dl>${Object.entries(SHORTCUTS).map(([keys, text]) => html`<dt>${keys}</dt><dd>${text}</dd>`)}</dl></details>
  </aside>`;
}
