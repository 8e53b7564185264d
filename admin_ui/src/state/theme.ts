import { effect, signal } from "@preact/signals";

import { keep, kept } from "../kept";

export type Theme = "light" | "dark";

const system = window.matchMedia("(prefers-color-scheme: dark)");
const stored = kept(() => localStorage, "theme");

/** The user's choice, or else the system's setting. */
export const theme = signal<Theme>(stored === "light" || stored === "dark" ? stored : systemTheme());

system.addEventListener("change", () => {
  if (kept(() => localStorage, "theme") === null) theme.value = systemTheme();
});

effect(() => {
  document.documentElement.dataset.theme = theme.value;
});

export function toggleTheme(): void {
  theme.value = theme.value === "dark" ? "light" : "dark";
  keep(() => localStorage, "theme", theme.value);
}

function systemTheme(): Theme {
  return system.matches ? "dark" : "light";
}
