// Markdown to Preact nodes. Text becomes text nodes, so model output cannot inject markup.

import { h, html, useMemo, useRef } from "/page/vendor/htm-preact.js";
import { Marked } from "/page/vendor/marked.js";
import footnotes from "/page/vendor/marked-footnote.js";
import { Code } from "/page/markdown/code.js";
import { Formula, mathExtensions } from "/page/markdown/math.js";

const NUM_OPEN = 4; // last blocks, with the spaces between them, that a text may change as it grows

// The top-level tokens of a text, and how many definitions of links and notes it has, which change other blocks.
function parse(text) {
  const marked = new Marked(footnotes(), { extensions: mathExtensions }); // footnotes are numbered per parser
  const all = marked.lexer(text, { ...marked.defaults, breaks: true });
  marked.walkTokens(all, marked.defaults.walkTokens);
  const tokens = all.filter(({ type, items }) => type !== "footnotes" || items.length);
  return { text, tokens, definitions: Object.keys(all.links).length + tokens.filter(({ type }) => type === "footnote").length };
}

// As `parse`, for a text that may go on where an earlier one ended, such as an answer: only its end is parsed.
function parseOn(earlier, text) {
  if (!earlier || earlier.definitions || !text.startsWith(earlier.text)) return parse(text);
  const closed = earlier.tokens.slice(0, -NUM_OPEN);
  const source = closed.map(({ raw }) => raw).join("");
  if (!text.startsWith(source)) return parse(text); // the parser has changed it, such as its tabs
  const { tokens, definitions } = parse(text.slice(source.length));
  return definitions ? parse(text) : { text, tokens: [...closed, ...tokens], definitions };
}

const ENTITY = /&(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z][a-z\d]{1,30});/gi;
const decoder = new DOMParser();
const decoded = (text) =>
  text.replace(ENTITY, (entity) => decoder.parseFromString(entity, "text/html").documentElement.textContent);

const isSafe = (href) => /^(https?|mailto):/i.test(href);

const link = (href, content) =>
  isSafe(href) ? html`<a href=${href} rel="noreferrer noopener" target="_blank">${content}</a>` : html`<span>${content}</span>`;

// A link inside a message; the page's own address names the view, so it is not changed.
function jump(event, name) {
  event.preventDefault();
  event.target.closest(".markdown").querySelector(`[data-note="${CSS.escape(name)}"]`)?.scrollIntoView({ block: "center" });
}

const note = (name, target, text, label) =>
  html`<a href="#" data-note=${name} aria-label=${label} onClick=${(event) => jump(event, target)}>${text}</a>`;

function Footnotes({ items }) {
  return html`<ol class="footnotes" aria-label="Footnotes">${items.map(({ label, content }) => html`<li>
    ${inside(content)} ${note(`to ${label}`, `from ${label}`, "↩", `Back to the reference of note ${label}`)}</li>`)}</ol>`;
}

function Table({ header, rows }) {
  const cell = (tag) => ({ tokens, align }) => h(tag, { class: align && `align-${align}` }, inside(tokens));
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>
    <thead><tr>${header.map(cell("th"))}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.map(cell("td"))}</tr>`)}</tbody></table></div>`;
}

function List({ ordered, start, items }) {
  const entries = items.map((item) => html`<li class=${item.task ? "task" : null}>${inside(item.tokens)}</li>`);
  return ordered ? html`<ol start=${start}>${entries}</ol>` : html`<ul>${entries}</ul>`;
}

const NODES = {
  // blocks
  space: () => null, def: () => null, footnote: () => null,
  hr: () => html`<hr />`,
  heading: ({ depth, tokens }) => html`<div role="heading" aria-level=${Math.min(6, depth + 1)} class="heading level-${depth}">${inside(tokens)}</div>`,
  paragraph: ({ tokens }) => html`<p>${inside(tokens)}</p>`,
  blockquote: ({ tokens }) => html`<blockquote>${inside(tokens)}</blockquote>`,
  code: ({ text, lang }) => html`<${Code} text=${text} language=${lang?.match(/\S+/)?.[0]} />`,
  list: List, table: Table, footnotes: Footnotes,
  mathBlock: ({ text }) => html`<${Formula} key=${text} tex=${text} isBlock />`,
  // inline
  text: ({ text, tokens }) => (tokens ? inside(tokens) : decoded(text)),
  escape: ({ text }) => text,
  strong: ({ tokens }) => html`<strong>${inside(tokens)}</strong>`,
  em: ({ tokens }) => html`<em>${inside(tokens)}</em>`,
  del: ({ tokens }) => html`<del>${inside(tokens)}</del>`,
  codespan: ({ text }) => html`<code>${text}</code>`,
  br: () => html`<br />`,
  checkbox: ({ checked }) => html`<input type="checkbox" checked=${checked} disabled aria-label=${checked ? "done" : "open"} /> `,
  link: ({ href, tokens }) => link(href, inside(tokens)),
  image: ({ href, text }) => link(href, text || href), // not loaded: it would tell its host that the chat is read
  html: ({ raw }) => (/^<br\s*\/?>$/i.test(raw) ? html`<br />` : raw),
  math: ({ text }) => html`<${Formula} key=${text} tex=${text} />`,
  footnoteRef: ({ label, id }) => html`<sup>${note(`from ${label}`, `to ${label}`, id, `Note ${id}`)}</sup>`,
};

const inside = (tokens) => tokens.map((token) => (Object.hasOwn(NODES, token.type) ? NODES[token.type](token) : token.raw));

// One block, built again only if its source or what it refers to has changed.
function Block({ token, definitions }) {
  const source = token.type === "footnotes" ? token : token.raw; // the list of notes has no source of its own
  return useMemo(() => NODES[token.type]?.(token) ?? null, [source, definitions]);
}

// What a text is parsed to, or null for one that is nested too deeply.
function useParsed(text) {
  const earlier = useRef(null);
  return useMemo(() => {
    try {
      earlier.current = parseOn(earlier.current, text);
    } catch {
      earlier.current = null;
    }
    return earlier.current;
  }, [text]);
}

export function Markdown({ text }) {
  const parsed = useParsed(text);
  if (!parsed) return html`<div class="markdown"><p class="plain">${text}</p></div>`;
  const { tokens, definitions } = parsed;
  return html`<div class="markdown">${tokens.map((token, place) => html`<${Block} key=${place} token=${token} definitions=${definitions} />`)}</div>`;
}
