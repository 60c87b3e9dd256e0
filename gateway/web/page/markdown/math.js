// LaTeX: `$…$`, `\(…\)`, `$$…$$` and `\[…\]` as extensions of the markdown parser; formulas as MathML.

import { html, useEffect, useRef } from "/page/vendor/htm-preact.js";

const INLINE = /^(?:\$(?!\s)((?:\\.|[^\\$\n])+?)(?<!\s)\$(?!\d)|\\\(([\s\S]+?)\\\))/;
const DISPLAY = /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])/;
const BLOCK = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/;

const tokenizer = (pattern, type) => (source) => {
  const match = pattern.exec(source);
  return match ? { type, raw: match[0], text: (match[1] ?? match[2]).trim() } : undefined;
};

// Where the next formula may begin: in a line, and as a block.
const start = (source) => source.match(/\$|\\[([]/)?.index;
const startOfBlock = (source) => source.match(/\n {0,3}(?:\$\$|\\\[)/)?.index;

export const mathExtensions = [
  { name: "mathBlock", level: "block", start: startOfBlock, tokenizer: tokenizer(BLOCK, "mathBlock") },
  { name: "mathDisplay", level: "inline", start, tokenizer: tokenizer(DISPLAY, "mathBlock") },
  { name: "math", level: "inline", start, tokenizer: tokenizer(INLINE, "math") },
];

let temml = null;

// The renderer, which is loaded with the first formula.
function renderer() {
  temml ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    Object.assign(script, { src: "/page/vendor/temml.js", onload: () => resolve(globalThis.temml), onerror: reject });
    document.head.append(script);
  });
  return temml;
}

export function Formula({ tex, isBlock }) {
  const place = useRef();
  useEffect(() => {
    renderer()
      .then(({ render }) => render(tex, place.current, { displayMode: isBlock, throwOnError: false, maxExpand: 1000 }))
      .catch(() => {}); // the source stays visible
  }, []);
  return html`<span class=${isBlock ? "formula block" : "formula"} title=${tex} ref=${place}>${tex}</span>`;
}
