// Light or dark: as the system is, or as chosen in this browser.

import { html, useState } from "/page/vendor/htm-preact.js";

const STORE = "podway-theme";
const MEDIA = { system: "(prefers-color-scheme: dark)", light: "not all", dark: "all" };
const THEMES = Object.keys(MEDIA);

const stored = () => (Object.hasOwn(MEDIA, localStorage.getItem(STORE)) ? localStorage.getItem(STORE) : "system");

function apply(theme) {
  document.getElementById("dark").media = MEDIA[theme];
}

apply(stored());

export function ThemeButton() {
  const [theme, setTheme] = useState(stored);
  const change = () => {
    const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(STORE, next);
    apply(next);
    setTheme(next);
  };
  return html`<button class="small" aria-label="Theme: ${theme}" title="Theme: ${theme}" onClick=${change}>${{ system: "◐", light: "☀", dark: "☾" }[theme]}</button>`;
}
