// Markdown to Preact nodes. Text only ever becomes text nodes, so model output cannot inject markup.

import { html } from "/page/vendor/htm-preact.js";

const INLINE =
  /(`+)([\s\S]+?)\1|\*\*([^*]+(?:\*(?!\*)[^*]+)*)\*\*|__([^_]+)__|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/;

function inline(text) {
  const nodes = [];
  let rest = text;
  for (let match; (match = INLINE.exec(rest)); ) {
    if (match.index) nodes.push(rest.slice(0, match.index));
    const [all, , code, strong, alsoStrong, emphasis, label, href] = match;
    if (code !== undefined) nodes.push(html`<code>${code}</code>`);
    else if (strong ?? alsoStrong) nodes.push(html`<strong>${inline(strong ?? alsoStrong)}</strong>`);
    else if (emphasis) nodes.push(html`<em>${inline(emphasis)}</em>`);
    else nodes.push(html`<a href=${href} rel="noreferrer noopener" target="_blank">${label}</a>`);
    rest = rest.slice(match.index + all.length);
  }
  nodes.push(rest);
  return nodes;
}

const FENCE = /^\s*```+\s*([\w+-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*\d+[.)]\s+(.*)$/;
const QUOTE = /^>\s?(.*)$/;
const ROW = /^\s*\|(.+)\|\s*$/;

const cells = (line) => ROW.exec(line)[1].split("|").map((cell) => cell.trim());

// A run of lines that match `pattern`, from `start` on: the captured texts and the next index.
function run(lines, start, pattern) {
  const found = [];
  let at = start;
  for (let match; at < lines.length && (match = pattern.exec(lines[at])); at += 1) found.push(match[1]);
  return [found, at];
}

export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  const items = (texts) => texts.map((each) => html`<li>${inline(each)}</li>`);
  while (at < lines.length) {
    const line = lines[at];
    let match;
    if ((match = FENCE.exec(line))) {
      let end = at + 1;
      while (end < lines.length && !FENCE.test(lines[end])) end += 1;
      blocks.push(html`<pre tabindex="0"><code>${lines.slice(at + 1, end).join("\n")}</code></pre>`);
      at = end + 1;
    } else if ((match = HEADING.exec(line))) {
      blocks.push(html`<p class="heading level-${match[1].length}">${inline(match[2])}</p>`);
      at += 1;
    } else if (BULLET.test(line)) {
      const [texts, next] = run(lines, at, BULLET);
      blocks.push(html`<ul>${items(texts)}</ul>`);
      at = next;
    } else if (NUMBER.test(line)) {
      const [texts, next] = run(lines, at, NUMBER);
      blocks.push(html`<ol>${items(texts)}</ol>`);
      at = next;
    } else if (QUOTE.test(line)) {
      const [texts, next] = run(lines, at, QUOTE);
      blocks.push(html`<blockquote>${inline(texts.join("\n"))}</blockquote>`);
      at = next;
    } else if (ROW.test(line) && /^[\s|:-]+$/.test(lines[at + 1] || "")) {
      let end = at + 2;
      while (end < lines.length && ROW.test(lines[end])) end += 1;
      blocks.push(html`<table>
        <thead><tr>${cells(line).map((cell) => html`<th>${inline(cell)}</th>`)}</tr></thead>
        <tbody>${lines.slice(at + 2, end).map(
          (row) => html`<tr>${cells(row).map((cell) => html`<td>${inline(cell)}</td>`)}</tr>`,
        )}</tbody></table>`);
      at = end;
    } else if (!line.trim()) {
      at += 1;
    } else {
      const paragraph = [];
      while (at < lines.length && lines[at].trim() && !FENCE.test(lines[at]) && !HEADING.test(lines[at]))
        paragraph.push(lines[at++]);
      blocks.push(html`<p>${inline(paragraph.join("\n"))}</p>`);
    }
  }
  return blocks;
}
