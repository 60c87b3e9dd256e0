// Where a message is written, with its images and files.

import { html, useState } from "/page/vendor/htm-preact.js";
import { Attachments, readFiles } from "/page/chat/attachments.js";

const NOTHING = { images: [], files: [] };

// `onSend` takes a content, images and files.
export function Composer({ isRunning, onSend, onStop, onEditLast, onError }) {
  const [text, setText] = useState("");
  const [attached, setAttached] = useState(NOTHING);
  const isEmpty = !text.trim() && !attached.images.length && !attached.files.length;

  async function attach(files) {
    try {
      const { images, files: texts } = await readFiles([...files]);
      setAttached((before) => ({ images: [...before.images, ...images], files: [...before.files, ...texts] }));
      onError(null);
    } catch (error) {
      onError(error.message);
    }
  }
  function take(event, transfer) {
    if (!transfer?.files.length) return;
    event.preventDefault();
    attach(transfer.files);
  }
  function send(event) {
    event.preventDefault();
    if (isEmpty || isRunning) return;
    onSend({ content: text, ...attached });
    setText("");
    setAttached(NOTHING);
  }
  function onKeyDown(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "ArrowUp" && !text) { event.preventDefault(); onEditLast(); }
  }
  return html`<form class="composer" onSubmit=${send} onDragOver=${(event) => event.preventDefault()}
      onDrop=${(event) => take(event, event.dataTransfer)}>
    <${Attachments} ...${attached} onRemove=${(kind, place) => setAttached({ ...attached, [kind]: attached[kind].toSpliced(place, 1) })} />
    <textarea id="message" aria-label="Message" placeholder="Message" rows="2" value=${text} dir="auto"
      onPaste=${(event) => take(event, event.clipboardData)} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown}></textarea>
    <label class="button">Attach<input class="hidden-file" type="file" multiple
      onChange=${(event) => { attach([...event.target.files]); event.target.value = ""; }} /></label>
    ${isRunning
      ? html`<button type="button" class="primary" id="stop" onClick=${onStop}>Stop</button>`
      : html`<button type="submit" class="primary" id="send" disabled=${isEmpty}>Send</button>`}
  </form>`;
}
