// System prompt, sampling and tools of a conversation, and presets of them.

import { html, useEffect, useState } from "/page/vendor/htm-preact.js";
import { presets } from "/page/chat/database.js";
import { toolsError } from "/page/chat/tools.js";

const SAMPLING = {
  temperature: { label: "Temperature", min: 0, max: 2, step: "any" },
  top_p: { label: "Top-p", min: 0, max: 1, step: "any" },
  top_k: { label: "Top-k", min: 0, step: 1 },
  min_p: { label: "Min-p", min: 0, max: 1, step: "any" },
  repetition_penalty: { label: "Repetition penalty", min: 0.01, max: 10, step: "any" },
  presence_penalty: { label: "Presence penalty", min: -2, max: 2, step: "any" },
  frequency_penalty: { label: "Frequency penalty", min: -2, max: 2, step: "any" },
  max_tokens: { label: "Max tokens", min: 1, step: 1 },
  seed: { label: "Seed", step: 1 },
};

// Only a valid number is taken; the browser says what is allowed.
function Sampling({ conversation, onChange }) {
  const take = (name, field) => {
    if (!field.reportValidity()) return;
    conversation.settings[name] = field.value;
    onChange();
  };
  return Object.entries(SAMPLING).map(([name, { label, ...limits }]) => html`<label key=${name}>${label}
    <input type="number" ...${limits} placeholder="default" value=${conversation.settings[name] ?? ""}
      onInput=${(event) => take(name, event.target)} /></label>`);
}

function Presets({ conversation, onChange }) {
  const [saved, setSaved] = useState([]);
  const [name, setName] = useState("");
  const load = () => presets.list().then(setSaved, () => {});
  useEffect(() => { load(); }, []);
  const chosen = saved.find((preset) => preset.name === name);
  const apply = (event) => {
    const preset = saved.find((each) => each.name === event.target.value);
    setName(event.target.value);
    if (!preset) return;
    const { system, settings, tools } = structuredClone(preset);
    Object.assign(conversation, { system, settings, tools });
    onChange();
  };
  const keep = async () => {
    const { system, settings, tools } = conversation;
    await presets.save({ name: name.trim(), system, settings, tools });
    load();
  };
  return html`<div class="wide presets">
    <label>Preset<select onChange=${apply}><option value="">none</option>
      ${saved.map((preset) => html`<option value=${preset.name} selected=${preset.name === name}>${preset.name}</option>`)}</select></label>
    <label>Name<input value=${name} onInput=${(event) => setName(event.target.value)} /></label>
    <button onClick=${keep} disabled=${!name.trim()}>Save preset</button>
    ${chosen && html`<button onClick=${() => { setName(""); presets.remove(chosen.name).then(load); }}>Delete preset</button>`}
  </div>`;
}

export function Settings({ conversation, onChange }) {
  const [tools, setTools] = useState(conversation.tools);
  const error = toolsError(tools);
  const change = (fields) => { Object.assign(conversation, fields); onChange(); };
  const takeTools = (text) => {
    setTools(text);
    if (!toolsError(text)) change({ tools: text });
  };
  return html`<section class="settings" aria-label="Settings of this chat">
    <${Presets} conversation=${conversation} onChange=${() => { setTools(conversation.tools); onChange(); }} />
    <label class="wide">System prompt
      <textarea rows="3" value=${conversation.system} onInput=${(event) => change({ system: event.target.value })}></textarea></label>
    <${Sampling} conversation=${conversation} onChange=${onChange} />
    <label class="wide">Stop texts, one a line
      <textarea rows="1" value=${conversation.settings.stop ?? ""}
        onInput=${(event) => change({ settings: { ...conversation.settings, stop: event.target.value } })}></textarea></label>
    <label class="wide">Tools <span class="soft">as in OpenAI's API; results are typed in</span>
      <textarea rows="2" spellcheck=${false} value=${tools} aria-invalid=${!!error} onInput=${(event) => takeTools(event.target.value)}></textarea></label>
    ${error && html`<p class="error wide" role="alert">${error}</p>`}
  </section>`;
}
