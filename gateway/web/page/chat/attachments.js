// Images and text files for a message: pasted, dropped or chosen. Images are scaled down in the browser.

import { html } from "/page/vendor/htm-preact.js";

const MAX_SIDE = 1280;
const KIND = "image/webp";
const QUALITY = 0.9;
const MAX_FILE_BYTES = 512 * 1024;

export const isImage = (url) => typeof url === "string" && /^data:image\/(png|jpeg|webp|gif);base64,/.test(url);

async function asUrl(file) {
  const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL(KIND, QUALITY);
}

async function readImage(file) {
  try {
    return await asUrl(file);
  } catch {
    throw new Error(`${file.name} is not an image that this browser can read`);
  }
}

async function readText(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} is longer than ${MAX_FILE_BYTES / 1024} KiB`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new Error("binary");
    return { name: file.name, text };
  } catch {
    throw new Error(`${file.name} is neither an image nor a text in UTF-8`);
  }
}

// The data URLs of images, and the names and texts of the other files. Raises an error that names the first one that
// cannot be read.
export async function readFiles(files) {
  const images = files.filter((file) => file.type.startsWith("image/"));
  const others = files.filter((file) => !file.type.startsWith("image/"));
  return { images: await Promise.all(images.map(readImage)), files: await Promise.all(others.map(readText)) };
}

// A file as it is sent: its name, and its text between fences that do not occur in it.
function quoted({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text}\n${fence}`;
}

// The content of a message in a chat request.
export function contentOf({ content, images = [], files = [] }) {
  const whole = [...files.map(quoted), content].filter(Boolean).join("\n\n");
  if (!images.length) return whole;
  const text = whole ? [{ type: "text", text: whole }] : [];
  return [...images.map((url) => ({ type: "image_url", image_url: { url } })), ...text];
}

// With `onRemove`, which takes "images" or "files" and a place, each has a button that removes it.
export function Attachments({ images = [], files = [], onRemove }) {
  if (!images.length && !files.length) return null;
  const remove = (kind, place, name) => onRemove
    && html`<button type="button" class="small" aria-label="Remove ${name}" onClick=${() => onRemove(kind, place)}>×</button>`;
  return html`<div class="attachments">
    ${images.map((url, place) => html`<figure><img src=${url} alt="Image ${place + 1}" />${remove("images", place, `image ${place + 1}`)}</figure>`)}
    ${files.map(({ name, text }, place) => html`<div class="file"><details><summary>${name}
      <span class="soft"> ${text.length.toLocaleString("en")} characters</span></summary><pre tabindex="0">${text}</pre></details>${remove("files", place, name)}</div>`)}
  </div>`;
}
