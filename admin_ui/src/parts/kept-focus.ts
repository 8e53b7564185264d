const FOCUSABLE = "a[href], button, input, select, textarea, summary, [tabindex='0']";
const HEADING = "h1, h2, h3";
/** Elements that cover the page temporarily. */
const PASSING = "dialog, .toasts";

/** The element that has the focus, or had it when it was removed. */
interface Holder {
  element: HTMLElement;
  isPassing: boolean;
  gap: Gap | null;
}

/** What remains on the page around a removed element. */
interface Gap {
  parent: Element;
  next: Node | null;
  previous: Node | null;
  /** Nodes added to `parent` at the same moment. */
  added: Node[];
}

let holder: Holder | null = null;
/** The last holder that was part of the page itself. */
let below: Holder | null = null;

/**
 * When a pressed button disappears, alone or with its row, the focus moves to its replacement: the same button of the next row,
 * or the heading of its section. A button that is disabled for a while gets the focus back afterwards.
 */
export function keepFocus(): void {
  document.addEventListener("focusin", ({ target }) => {
    if (!(target instanceof HTMLElement)) return;
    holder = { element: target, isPassing: target.closest(PASSING) !== null, gap: null };
    if (!holder.isPassing) below = holder;
  });
  document.addEventListener("focusout", ({ target }) => {
    // Deferred: only then is it clear whether the user moved the focus or the element was removed or disabled.
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

/** An icon button's title is the same in every row; its label also names the row's object. */
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

/** Without scrolling, so that nothing moves under the pointer. */
function focus(element: HTMLElement | null): void {
  if (element && !element.matches(FOCUSABLE)) element.tabIndex = -1;
  element?.focus({ preventScroll: true });
}
