/** Also works if the browser offers no clipboard API (plain http from another machine). Throws if the browser refuses to copy. */
export async function copyText(text: string): Promise<void> {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Inside an open dialog, if there is one: everything outside it is inert.
  const place = document.querySelector("dialog[open]") ?? document.body;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  place.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("The browser blocked copying. Select the text and copy it manually.");
}

/** 128 random bits in hex; `crypto.randomUUID` is missing over plain http. */
export function randomId(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
