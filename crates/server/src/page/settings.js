// What the reader has chosen, kept in the browser.

import { $ } from "./dom.js";

const DEFAULTS = { system: "", temperature: "0.7", top_p: "0.95", max_tokens: "512", seed: "", key: "", theme: "" };

const stored = (name) => {
  try { return localStorage.getItem("moeflux." + name); } catch { return null; }
};

export function keepSettings(changed) {
  for (const [name, usual] of Object.entries(DEFAULTS)) {
    const field = $(name);
    field.value = stored(name) ?? usual;
    field.addEventListener("change", () => {
      try { localStorage.setItem("moeflux." + name, field.value); } catch { /* private windows keep nothing */ }
      if (name === "theme") showTheme();
      changed(name);
    });
  }
  showTheme();
}

function showTheme() {
  const theme = $("theme").value;
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

export const headers = () => ({
  "content-type": "application/json",
  ...($("key").value ? { authorization: "Bearer " + $("key").value } : {}),
});

// What of a request the settings say; fields without a number are left to the server.
export function sampling() {
  const number = (name) => ($(name).value === "" || !$(name).checkValidity() ? undefined : Number($(name).value));
  const fields = ["temperature", "top_p", "max_tokens", "seed"];
  return Object.fromEntries(fields.map((name) => [name, number(name)]));
}

export const system = () => $("system").value.trim();
