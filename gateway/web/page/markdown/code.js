// Code blocks: the language, a button that copies, and colours once the language's grammar is loaded.

import { html, useEffect, useMemo, useState } from "/page/vendor/htm-preact.js";
import { CopyButton } from "/page/copy.js";

const MAX_HIGHLIGHTED = 50_000; // characters
const GRAMMARS = "bash cpp diff dockerfile go ini java json markdown python rust shell sql typescript xml yaml".split(" ");
const ALIASES = {
  c: "cpp", "c++": "cpp", cc: "cpp", h: "cpp", hpp: "cpp", cuda: "cpp", console: "shell", golang: "go", html: "xml", svg: "xml",
  javascript: "typescript", js: "typescript", jsx: "typescript", mjs: "typescript", ts: "typescript", tsx: "typescript",
  jsonc: "json", md: "markdown", patch: "diff", py: "python", python3: "python", rs: "rust", sh: "bash", zsh: "bash",
  toml: "ini", yml: "yaml",
};

let core = null;
const loaded = new Set();

// Loads a grammar, and before the first one the highlighter.
async function load(grammar) {
  const [library, language] = await Promise.all([
    import("/page/vendor/highlight.js"),
    import(`/page/vendor/languages/${grammar}.js`),
  ]);
  core = library.default;
  core.registerLanguage(grammar, language.default);
  loaded.add(grammar);
}

function grammarOf(language) {
  const name = language.toLowerCase();
  const grammar = Object.hasOwn(ALIASES, name) ? ALIASES[name] : name;
  return GRAMMARS.includes(grammar) ? grammar : null;
}

export function Code({ text, language = "" }) {
  const grammar = grammarOf(language);
  const [isReady, setIsReady] = useState(loaded.has(grammar));
  useEffect(() => {
    let isShown = true;
    if (grammar) load(grammar).then(() => isShown && setIsReady(true), () => {}); // uncoloured code can be read, too
    return () => { isShown = false; };
  }, [grammar]);
  // The highlighter escapes the text, so that its markup has no other elements than its own spans.
  const markup = useMemo(
    () => (isReady && loaded.has(grammar) && text.length <= MAX_HIGHLIGHTED ? core.highlight(text, { language: grammar }).value : null),
    [text, grammar, isReady],
  );
  return html`<div class="code"><div class="code-bar"><span>${language || "text"}</span><${CopyButton} text=${text} label="Copy code" /></div>
    <pre tabindex="0">${markup === null
      ? html`<code key="plain">${text}</code>`
      : html`<code key="colored" dangerouslySetInnerHTML=${{ __html: markup }}></code>`}</pre></div>`;
}
