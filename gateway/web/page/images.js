// Images for a message: pasted, dropped or chosen. They are scaled down in the browser, so that a
// conversation with some of them fits into its storage.

import { html } from "/page/vendor/htm-preact.js";

const MAX_SIDE = 1280;
const KIND = "image/webp";
const QUALITY = 0.9;

export const isImage = (url) => typeof url === "string" && /^data:image\/(png|jpeg|webp|gif);base64,/.test(url);

// The image files of a paste or a drop.
export const imageFiles = (transfer) => [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));

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

// The data URLs of files. Throws an error that names the first one that is no image.
export async function readImages(files) {
  return Promise.all([...files].map(async (file) => {
    try {
      return await asUrl(file);
    } catch {
      throw new Error(`${file.name} is not an image that this browser can read`);
    }
  }));
}

// The content of a message in a chat request.
export function contentOf({ content, images = [] }) {
  if (!images.length) return content;
  const text = content ? [{ type: "text", text: content }] : [];
  return [...images.map((url) => ({ type: "image_url", image_url: { url } })), ...text];
}

export function Pictures({ images = [], onRemove }) {
  if (!images.length) return null;
  return html`<div class="pictures">${images.map((url, place) => html`<figure>
    <img src=${url} alt="Image ${place + 1}" />
    ${onRemove && html`<button type="button" class="small" aria-label="Remove image ${place + 1}" onClick=${() => onRemove(place)}>×</button>`}
  </figure>`)}</div>`;
}
