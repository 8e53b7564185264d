const FOCUSABLE = "a[href], button, input, select, textarea, summary, [tabindex='0']";
const HEADING = "h1, h2, h3";
/** What lies over the page and goes again. */
const PASSING = "dialog, .toasts";

/** What has the focus, or had it when it went. */
interface Holder {
  element: HTMLElement;
  isPassing: boolean;
  gap: Gap | null;
}

/** What is still on the page beside what went. */
interface Gap {
  parent: Element;
  next: Node | null;
  previous: Node | null;
  /** In the same moment. */
  added: Node[];
}

let holder: Holder | null = null;
/** The last one that was part of the page itself. */
let below: Holder | null = null;

/**
 * A button that goes when it was pressed, alone or with its row, leaves the focus to what takes its place: the same button
 * of the next row, or the heading of what it was in. One that cannot be pressed for a while has it again afterwards.
 */
export function keepFocus(): void {
  document.addEventListener("focusin", ({ target }) => {
    if (!(target instanceof HTMLElement)) return;
    holder = { element: target, isPassing: target.closest(PASSING) !== null, gap: null };
    if (!holder.isPassing) below = holder;
  });
  document.addEventListener("focusout", ({ target }) => {
    // Later, when it is clear whether the person left it or it left the person.
    queueMicrotask(() => {
      if (isFree() && holder?.element === target && canHave(holder.element)) holder = below = null;
    });
  });
  new MutationObserver((records) => {
    for (const one of new Set([holder, below])) if (one && !one.element.isConnected) one.gap = gapOf(one.element, records) ?? one.gap;
    if (holder !== null && isFree()) giveBack(holder);
  }).observe(document.body, { childList: true, subtree: true, attributes: true, attributeFilter: ["disabled", "hidden"] });
}

function giveBack(lost: Holder): void {
  if (lost.element.isConnected) {
    if (canHave(lost.element)) focus(lost.element);
    return;
  }
  const from = lost.isPassing ? below : lost;
  if (from && canHave(from.element)) focus(from.element);
  else focus((from && from.gap && place(from.element, from.gap)) ?? headingIn(document.body) ?? document.getElementById("main"));
}

function gapOf(element: Element, records: MutationRecord[]): Gap | null {
  let lost: Node = element;
  for (const { target, removedNodes, nextSibling, previousSibling } of records) {
    if (![...removedNodes].some((node) => node.contains(lost))) continue;
    if (target instanceof Element && target.isConnected) {
      const added = records.filter((record) => record.target === target).flatMap((record) => [...record.addedNodes]);
      return { parent: target, next: nextSibling, previous: previousSibling, added };
    }
    lost = target;
  }
  return null;
}

function place(element: HTMLElement, { parent, next, previous, added }: Gap): HTMLElement | null {
  const replacement = added.find((node): node is HTMLElement => node instanceof HTMLElement && node.tagName === element.tagName && canHave(node));
  if (replacement) return replacement;
  const row = parent.closest("tr, li");
  const scopes = [...siblings(next, true), ...siblings(previous, false)];
  if (row) scopes.push(...siblings(row.nextSibling, true), ...siblings(row.previousSibling, false));
  for (const scope of scopes) {
    const found = [scope, ...scope.querySelectorAll(FOCUSABLE)].find((other): other is HTMLElement => other instanceof HTMLElement && isAlike(other, element) && canHave(other));
    if (found) return found;
  }
  for (let scope: Element | null = parent; scope; scope = scope.parentElement) {
    const heading = headingIn(scope);
    if (heading) return heading;
  }
  return null;
}

function siblings(first: Node | null, forward: boolean): Element[] {
  const found: Element[] = [];
  for (let node = first; node; node = forward ? node.nextSibling : node.previousSibling) if (node instanceof Element) found.push(node);
  return found;
}

function isAlike(one: HTMLElement, other: HTMLElement): boolean {
  return one.tagName === other.tagName && one.className === other.className && wordsOf(one) === wordsOf(other);
}

/** An icon's title says what it does, its label also to what. */
function wordsOf({ title, textContent }: HTMLElement): string {
  return title || (textContent?.trim() ?? "");
}

function headingIn(scope: Element): HTMLElement | null {
  return [...scope.querySelectorAll<HTMLElement>(HEADING)].find((heading) => heading.checkVisibility() && !heading.closest(PASSING)) ?? null;
}

function canHave(element: HTMLElement): boolean {
  return element.isConnected && element.checkVisibility() && !element.matches(":disabled");
}

function isFree(): boolean {
  return document.activeElement === null || document.activeElement === document.body;
}

/** Where it is: nothing moves under the pointer of who pressed it. */
function focus(element: HTMLElement | null): void {
  if (element && !element.matches(FOCUSABLE)) element.tabIndex = -1;
  element?.focus({ preventScroll: true });
}
