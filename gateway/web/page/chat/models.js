// The choice of a model: names, adapters under their base, and what is loaded.

import { html } from "/page/vendor/htm-preact.js";

function labelOf({ id, parent, status }) {
  const words = [parent && `adapter of ${parent}`, status && status.value !== "loaded" && status.value].filter(Boolean);
  return words.length ? `${id} (${words.join(", ")})` : id;
}

export function ModelPicker({ models, model, reload, onModel }) {
  return html`<label class="row">Model
    <select onFocus=${reload} onChange=${(event) => onModel(event.target.value)} title=${model?.status?.error}>
      ${models.map((each) => html`<option value=${each.id} selected=${each === model}>${labelOf(each)}</option>`)}
    </select></label>`;
}
