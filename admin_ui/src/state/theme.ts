import { effect, signal } from "@preact/signals";

export type Theme = "light" | "dark";

const system = window.matchMedia("(prefers-color-scheme: dark)");
const stored = localStorage.getItem("theme");

/** What the person chose, or else what their system says. */
export const theme = signal<Theme>(stored === "light" || stored === "dark" ? stored : systemTheme());

system.addEventListener("change", () => {
  if (localStorage.getItem("theme") === null) theme.value = systemTheme();
});

effect(() => {
  document.documentElement.dataset.theme = theme.value;
});

export function toggleTheme(): void {
  theme.value = theme.value === "dark" ? "light" : "dark";
  localStorage.setItem("theme", theme.value);
}

function systemTheme(): Theme {
  return system.matches ? "dark" : "light";
}
