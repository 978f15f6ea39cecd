// Scroll position of the thread. At the end, the view follows new content; elsewhere the top visible row keeps its
// position while rows around it grow, are measured, or are left out.

import { signal } from "@preact/signals";
import type { Message } from "../../chat/tree";
import { RowHeights, rowOffsets, type Slot, toSlots, visibleRows } from "./virtualRows";

const NEAR_END_PX = 48;
const MARGIN_PX = 16;
const HIGHLIGHT_MS = 1600;
const USER_SCROLL_MS = 1000; // for this long after an input event, scrolling is attributed to the user
const PRINT_EVENTS = ["beforeprint", "afterprint"];
const FORMS = ".compare-form, .user-editor";
const USER_INPUT_EVENTS = ["wheel", "touchmove", "pointerdown", "keydown"];

interface Anchor {
  readonly key: string;
  readonly offsetPx: number; // top of the row relative to the top of the viewport
}

export class ThreadScroll {
  readonly pinned = signal(true);
  readonly version = signal(0); // incremented when other rows have to be rendered
  private box: HTMLElement | null = null;
  private topPx = Infinity; // Infinity: the end
  private heightPx = 0;
  private ownTopPx = -1; // position that was restored last
  private contentPx = 0; // scrollHeight when the position was last restored
  private isPrinting = false; // paper shows all rows
  private userInputMs = -Infinity;
  private anchor: Anchor | null = null;
  private focused: string | null = null;
  private form: HTMLElement | null = null; // the last one that got the focus
  private path: readonly Message[] = [];
  private starts: readonly number[] = [0];
  private shown: readonly number[] = [];
  private readonly heights = new RowHeights();
  private readonly rows = new Map<string, HTMLElement>();
  private readonly observer = new ResizeObserver((entries) => this.onResize(entries));

  /** Observe the scroll container and its content; returns the function that stops it. */
  attach(box: HTMLElement, inner: HTMLElement): () => void {
    this.box = box;
    this.heightPx = box.clientHeight;
    this.observer.observe(box);
    this.observer.observe(inner);
    const byReader = () => (this.userInputMs = performance.now());
    for (const kind of USER_INPUT_EVENTS) box.addEventListener(kind, byReader, { passive: true });
    const onPrint = ({ type }: Event) => {
      this.isPrinting = type === "beforeprint";
      this.redraw();
    };
    for (const kind of PRINT_EVENTS) addEventListener(kind, onPrint);
    return () => {
      this.observer.disconnect();
      for (const kind of PRINT_EVENTS) removeEventListener(kind, onPrint);
      for (const kind of USER_INPUT_EVENTS) box.removeEventListener(kind, byReader);
    };
  }

  /** Return the rows and spaces to render for `path`. */
  slots(path: readonly Message[]): Slot[] {
    this.path = path;
    this.starts = rowOffsets(path.map((message) => this.heights.of(message)));
    this.shown = this.wantedRows();
    return toSlots(this.shown, this.starts);
  }

  /** Register or unregister the element of a row. */
  setRowElement(key: string, element: HTMLElement | null): void {
    const old = this.rows.get(key);
    if (old === element) return;
    if (old) this.observer.unobserve(old);
    if (element) {
      this.rows.set(key, element);
      this.observer.observe(element);
    } else this.rows.delete(key);
  }

  /** Show another conversation, from its end. */
  reset(): void {
    this.anchor = null;
    this.focused = null;
    this.topPx = Infinity;
    this.pinned.value = true;
  }

  /** Restore the position after rows were added, removed or resized. */
  restorePosition(): void {
    const { box } = this;
    if (!box) return;
    this.contentPx = box.scrollHeight;
    const isAllVisible = box.scrollHeight - box.clientHeight < 2;
    if (isAllVisible) this.pinned.value = true;
    if (this.pinned.peek()) {
      // the start page is shown from its top
      const end = this.path.length === 0 ? 0 : box.scrollHeight - box.clientHeight;
      if (Math.abs(box.scrollTop - end) >= 1) box.scrollTop = end;
      this.ownTopPx = box.scrollTop;
      return;
    }
    const row = this.anchor && this.rows.get(this.anchor.key);
    if (!row || !this.anchor) return;
    const drift = this.offsetOf(row) - this.anchor.offsetPx;
    if (Math.abs(drift) >= 1) box.scrollTop += drift;
  }

  onScroll(): void {
    const { box } = this;
    if (!box) return;
    const nowMs = performance.now();
    const isUser = nowMs - this.userInputMs < USER_SCROLL_MS && box.scrollTop !== this.ownTopPx;
    if (isUser) this.userInputMs = nowMs;
    // layout changed the position, not the user
    else if (this.pinned.peek() && box.scrollHeight !== this.contentPx) this.restorePosition();
    const upwards = Number.isFinite(this.topPx) && box.scrollTop < this.topPx - 1;
    this.topPx = box.scrollTop;
    const below = box.scrollHeight - box.scrollTop - box.clientHeight;
    if (this.path.length === 0 || below < 2) this.pinned.value = true;
    else if (upwards) this.pinned.value = false;
    else if (below < NEAR_END_PX && box.scrollTop !== this.ownTopPx) this.pinned.value = true;
    if (this.pinned.peek()) this.anchor = null;
    else this.saveAnchor();
    this.refresh();
  }

  onFocusMoved(target: EventTarget | null): void {
    const row = target instanceof Element ? target.closest<HTMLElement>("[data-key]") : null;
    this.focused = row?.dataset.key ?? null; // the focused row stays in the document
    const form = row?.querySelector<HTMLElement>(FORMS);
    if (!form || form === this.form || !form.contains(target as Node)) return;
    this.form = form; // not when the focus returns to it
    this.scrollToForm(form);
  }

  /** Show a form that was opened in a row from its top, if it does not fit below. */
  private scrollToForm(form: HTMLElement): void {
    const { box } = this;
    if (!box || (this.offsetOf(form) >= 0 && form.getBoundingClientRect().bottom <= box.getBoundingClientRect().bottom))
      return;
    this.pinned.value = false;
    box.scrollTop += this.offsetOf(form) - MARGIN_PX;
    this.topPx = this.ownTopPx = box.scrollTop;
    this.saveAnchor();
  }

  scrollToEnd(): void {
    this.userInputMs = -Infinity; // earlier input does not explain the next changes of the position
    this.anchor = null;
    this.topPx = Infinity;
    this.pinned.value = true;
    this.redraw();
    this.restorePosition();
  }

  /** Scroll the row of `message` to the top and highlight it briefly. */
  scrollToRow(message: Message): void {
    const index = this.path.indexOf(message);
    if (index < 0) return;
    this.pinned.value = false;
    this.anchor = { key: message.key, offsetPx: MARGIN_PX };
    this.topPx = Math.max(0, this.starts[index]! - MARGIN_PX);
    this.redraw();
    requestAnimationFrame(() => this.highlight(message.key));
  }

  /** Focus the button with this name in the row of `message`, or the row itself. */
  focusRow({ key }: Message, name: string | null | undefined): void {
    const row = this.rows.get(key);
    const buttons = [...(row?.querySelectorAll<HTMLElement>("button:enabled") ?? [])];
    const same = buttons.find((button) => button.getAttribute("aria-label") === name);
    (same ?? row)?.focus({ preventScroll: true });
  }

  private highlight(key: string): void {
    this.restorePosition();
    const row = this.rows.get(key);
    if (!row) return;
    // keep the focus in the branch map and in the search, which take the next key
    if (!document.activeElement?.closest(".side-panel, .find")) row.focus({ preventScroll: true });
    row.classList.add("row-highlight");
    setTimeout(() => row.classList.remove("row-highlight"), HIGHLIGHT_MS);
  }

  private onResize(entries: readonly ResizeObserverEntry[]): void {
    let changed = false;
    for (const { target, borderBoxSize } of entries) {
      const key = (target as HTMLElement).dataset.key;
      if (key !== undefined) changed = this.heights.record(key, borderBoxSize[0]!.blockSize) || changed;
    }
    this.heightPx = this.box?.clientHeight ?? 0;
    if (changed) this.starts = rowOffsets(this.path.map((message) => this.heights.of(message)));
    this.restorePosition();
    this.refresh();
  }

  /** Request a redraw if other rows are needed. */
  private refresh(): void {
    const wanted = this.wantedRows();
    if (wanted.length !== this.shown.length || wanted.some((index, at) => index !== this.shown[at])) this.redraw();
  }

  private redraw(): void {
    this.version.value = this.version.peek() + 1; // peek: this is called from effects, which must not subscribe
  }

  private wantedRows(): number[] {
    if (this.isPrinting) return this.path.map((_, index) => index);
    const keep = [this.focused, this.anchor?.key].map((key) => this.path.findIndex((message) => message.key === key));
    return visibleRows(this.starts, this.topPx, this.heightPx, keep);
  }

  /** Save the top visible row and its offset. */
  private saveAnchor(): void {
    for (const index of this.shown) {
      const key = this.path[index]?.key;
      const row = key === undefined ? undefined : this.rows.get(key);
      if (!row || key === undefined) continue;
      const offsetPx = this.offsetOf(row);
      if (offsetPx + row.offsetHeight <= 0) continue;
      this.anchor = { key, offsetPx };
      return;
    }
  }

  private offsetOf(row: HTMLElement): number {
    return row.getBoundingClientRect().top - this.box!.getBoundingClientRect().top;
  }
}
