// The page: a header with views, and a dialog that asks for the API key when the server wants one. The views other
// than the chat are loaded when they are opened.

import { html, render, useEffect, useState } from "/page/vendor/htm-preact.js";
import { key, json } from "/page/api.js";
import { Chat } from "/page/chat/chat.js";
import { ThemeButton } from "/page/theme.js";

const VIEWS = {
  chat: () => Chat,
  engine: async () => (await import("/page/engine.js")).Engine,
  request: async () => (await import("/page/timeline.js")).Timeline,
  replay: async () => (await import("/page/replay.js")).Replay,
};
const TITLES = { chat: "Chat", engine: "Engine", request: "Request", replay: "Replay" };

function route() {
  const [view, ...rest] = location.hash.slice(1).split("/");
  return { view: Object.hasOwn(VIEWS, view) ? view : "chat", argument: decodeURIComponent(rest.join("/")) };
}

function KeyDialog({ error, onKey }) {
  const [value, setValue] = useState("");
  const submit = (event) => {
    event.preventDefault();
    key.set(value.trim());
    onKey();
  };
  return html`<main class="key"><form onSubmit=${submit} aria-labelledby="key-title">
    <h1 id="key-title">API key</h1>
    <p>This server requires an API key. It is kept in this tab until the tab is closed.</p>
    ${error && key.get() && html`<p class="error" role="alert">${error}</p>`}
    <label>API key
      <input type="password" autocomplete="off" value=${value} autofocus
        onInput=${(event) => setValue(event.target.value)} />
    </label>
    <button type="submit" disabled=${!value.trim()}>Continue</button>
  </form></main>`;
}

// Removes the key of this tab; the dialog asks for another one.
function KeyButton({ onForget }) {
  if (!key.get()) return null;
  return html`<button class="small" onClick=${() => { key.set(""); onForget(); }}>API key</button>`;
}

// A view, once its module is loaded.
function View({ name, ...properties }) {
  const [shown, setShown] = useState(name === "chat" ? { name, content: Chat } : null);
  useEffect(() => {
    let isWanted = true;
    Promise.resolve(VIEWS[name]()).then((content) => isWanted && setShown({ name, content }), properties.onError);
    return () => { isWanted = false; };
  }, [name]);
  return shown?.name === name && html`<${shown.content} ...${properties} />`;
}

function App() {
  const [where, setWhere] = useState(route());
  const [models, setModels] = useState(null);
  const [error, setError] = useState(null);
  const load = () =>
    json("/v1/models")
      .then((found) => { setModels(found.data); setError(null); })
      .catch(setError);
  useEffect(() => {
    const follow = () => setWhere(route());
    addEventListener("hashchange", follow);
    load();
    return () => removeEventListener("hashchange", follow);
  }, []);
  if (error?.status === 401) return html`<${KeyDialog} error=${error.message} onKey=${load} />`;
  return html`
    <header>
      <strong class="brand">Podway</strong>
      <nav aria-label="Views">${Object.entries(TITLES).map(
        ([name, title]) => html`<a href="#${name}" aria-current=${name === where.view ? "page" : null}>${title}</a>`,
      )}</nav>
      <span class="grow"></span>
      <${ThemeButton} />
      <${KeyButton} onForget=${load} />
    </header>
    ${error && html`<p class="error" role="alert">The server cannot be reached: ${error.message}
      <button onClick=${load}>Try again</button></p>`}
    <main class=${where.view}>
      ${models && html`<${View} name=${where.view} models=${models} argument=${where.argument} reload=${load} onError=${setError} />`}
    </main>`;
}

render(html`<${App} />`, document.getElementById("app"));
