// A button that copies a text.

import { html, useState } from "/page/vendor/htm-preact.js";

const SHOWN_MS = 1500;

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = document.createElement("textarea"); // pages without TLS on other hosts have no clipboard
  box.value = text;
  document.body.append(box);
  box.select();
  const isCopied = document.execCommand("copy");
  box.remove();
  if (!isCopied) throw new Error("the browser did not copy");
}

export function CopyButton({ text, label = "Copy" }) {
  const [state, setState] = useState(null);
  const click = async () => {
    setState(await copy(text).then(() => "Copied", () => "Not copied"));
    setTimeout(() => setState(null), SHOWN_MS);
  };
  return html`<button type="button" class="small" onClick=${click}>${state ?? label}</button>`;
}
