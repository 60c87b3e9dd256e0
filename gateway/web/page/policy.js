// The scheduling policy in force, and a form that changes it and its settings.

import { html, useEffect, useState } from "/page/vendor/htm-preact.js";
import { json } from "/page/api.js";

const ABOUT = {
  fcfs: "first come, first served",
  mlfq: "multi-level feedback queue: short requests first, without knowing their length",
  priority: "by the priority of the request, the lowest number first",
  fair: "equal shares for all API keys, by weight",
  deadline: "the earliest deadline that can still be met first",
};

// Settings that a policy uses, in the order of the form; all settings for a policy that is not here.
const USED = {
  fcfs: [], deadline: [], priority: ["starvation_seconds"], fair: ["input_weight", "output_weight"],
  mlfq: ["num_levels", "base_quantum", "quantum_ratio", "starvation_seconds", "skip_join"],
};

const LABELS = {
  num_levels: "Levels", base_quantum: "First quantum s", quantum_ratio: "Quantum ratio", skip_join: "Skip-join",
  starvation_seconds: "Starvation s", input_weight: "Weight of input", output_weight: "Weight of output",
};

function Field({ name, value, onInput }) {
  if (typeof value === "boolean")
    return html`<label class="row"><input type="checkbox" checked=${value}
      onChange=${(event) => onInput(name, event.target.checked)} />${LABELS[name] ?? name}</label>`;
  return html`<label>${LABELS[name] ?? name}<input type="number" step="any" placeholder="default" value=${value ?? ""}
    onInput=${(event) => onInput(name, event.target.value === "" ? null : Number(event.target.value))} /></label>`;
}

export function Policy({ snapshot, onError }) {
  const [found, setFound] = useState(null);
  const [choice, setChoice] = useState(snapshot.policy);
  const [changes, setChanges] = useState({});
  const keep = (answer) => { setFound(answer); setChoice(answer.policy); setChanges({}); onError(null); };
  useEffect(() => { json("/admin/policy").then(keep).catch(onError); }, [snapshot.policy]);
  const apply = (event) => {
    event.preventDefault();
    json("/admin/policy", { method: "POST", body: { policy: choice, ...changes } }).then(keep).catch(onError);
  };
  const settings = found?.settings ?? {};
  const names = USED[choice] ?? Object.keys(settings);
  const isChanged = choice !== snapshot.policy || Object.keys(changes).length > 0;
  return html`<form class="policy" onSubmit=${apply} aria-label="Scheduling policy">
    <label>Policy<select value=${choice} onChange=${(event) => setChoice(event.target.value)}>
      ${snapshot.policies.map((name) => html`<option value=${name} selected=${name === choice}>${name}</option>`)}</select></label>
    ${names.filter((name) => name in settings).map((name) => html`<${Field} key=${name} name=${name}
      value=${name in changes ? changes[name] : settings[name]}
      onInput=${(field, value) => setChanges((before) => ({ ...before, [field]: value }))} />`)}
    <button class="primary" disabled=${!isChanged}>Apply</button>
    <span class="soft">${ABOUT[choice] ?? ""}; admission ${snapshot.admission}</span></form>`;
}
