// The scroll position of the thread. It follows the end for a reader who is there; for any other reader the line that is
// at the top stays where it is, whatever grows, is measured or is left out around it.

import { signal } from "@preact/signals";
import type { Message } from "../../chat/tree";
import { RowHeights, rowOffsets, type Slot, toSlots, visibleRows } from "./virtualRows";

const NEAR_END_PX = 48;
const MARGIN_PX = 16;
const HIGHLIGHT_MS = 1600;
const USER_SCROLL_MS = 1000; // so long after the last of these, or the last scroll of theirs, it is the reader who scrolls
const USER_INPUT_EVENTS = ["wheel", "touchmove", "pointerdown", "keydown"];

interface Anchor {
  readonly key: string;
  readonly offsetPx: number; // of the row's top from the top of the screen
}

export class ThreadScroll {
  readonly pinned = signal(true);
  readonly version = signal(0); // other rows are wanted
  private box: HTMLElement | null = null;
  private topPx = Infinity; // the end
  private heightPx = 0;
  private contentPx = 0; // of all rows, when the position was last put right
  private userInputMs = -Infinity;
  private anchor: Anchor | null = null;
  private focused: string | null = null;
  private path: readonly Message[] = [];
  private starts: readonly number[] = [0];
  private shown: readonly number[] = [];
  private readonly heights = new RowHeights();
  private readonly rows = new Map<string, HTMLElement>();
  private readonly observer = new ResizeObserver((entries) => this.onResize(entries));

  /** Watch the scroller and what is in it; returns what ends that. */
  attach(box: HTMLElement, inner: HTMLElement): () => void {
    this.box = box;
    this.heightPx = box.clientHeight;
    this.observer.observe(box);
    this.observer.observe(inner);
    const byReader = () => (this.userInputMs = performance.now());
    for (const kind of USER_INPUT_EVENTS) box.addEventListener(kind, byReader, { passive: true });
    return () => {
      this.observer.disconnect();
      for (const kind of USER_INPUT_EVENTS) box.removeEventListener(kind, byReader);
    };
  }

  /** The rows and spaces of `path` as they have to be now. */
  slots(path: readonly Message[]): Slot[] {
    this.path = path;
    this.starts = rowOffsets(path.map((message) => this.heights.of(message)));
    this.shown = this.wantedRows();
    return toSlots(this.shown, this.starts);
  }

  /** Take or give up the element of a row. */
  setRowElement(key: string, element: HTMLElement | null): void {
    const old = this.rows.get(key);
    if (old === element) return;
    if (old) this.observer.unobserve(old);
    if (element) {
      this.rows.set(key, element);
      this.observer.observe(element);
    } else this.rows.delete(key);
  }

  /** Another conversation: begin at its end. */
  reset(): void {
    this.anchor = null;
    this.focused = null;
    this.topPx = Infinity;
    this.pinned.value = true;
  }

  /** After rows came, went or changed their size: put the position right. */
  restorePosition(): void {
    const { box } = this;
    if (!box) return;
    this.contentPx = box.scrollHeight;
    if (this.pinned.peek()) {
      const end = this.path.length === 0 ? 0 : box.scrollHeight - box.clientHeight; // the start page is read from its top
      if (Math.abs(box.scrollTop - end) >= 1) box.scrollTop = end;
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
    if (nowMs - this.userInputMs < USER_SCROLL_MS) this.userInputMs = nowMs;
    else if (this.pinned.peek() && box.scrollHeight !== this.contentPx) this.restorePosition(); // rows moved it, nobody left the end
    const upwards = Number.isFinite(this.topPx) && box.scrollTop < this.topPx - 1;
    this.topPx = box.scrollTop;
    const below = box.scrollHeight - box.scrollTop - box.clientHeight;
    if (this.path.length === 0 || below < 2) this.pinned.value = true;
    else if (upwards) this.pinned.value = false;
    else if (below < NEAR_END_PX) this.pinned.value = true;
    if (this.pinned.peek()) this.anchor = null;
    else this.saveAnchor();
    this.refresh();
  }

  onFocusMoved(target: EventTarget | null): void {
    const row = target instanceof Element ? target.closest<HTMLElement>("[data-key]") : null;
    this.focused = row?.dataset.key ?? null; // a row that has the focus is not left out
  }

  scrollToEnd(): void {
    this.anchor = null;
    this.topPx = Infinity;
    this.pinned.value = true;
    this.redraw();
    this.restorePosition();
  }

  /** Bring the row of `message` to the top, and mark it for a moment. */
  scrollToRow(message: Message): void {
    const index = this.path.indexOf(message);
    if (index < 0) return;
    this.pinned.value = false;
    this.anchor = { key: message.key, offsetPx: MARGIN_PX };
    this.topPx = Math.max(0, this.starts[index]! - MARGIN_PX);
    this.redraw();
    requestAnimationFrame(() => this.highlight(message.key));
  }

  private highlight(key: string): void {
    this.restorePosition();
    const row = this.rows.get(key);
    if (!row) return;
    // whoever walks along the branch map goes on walking there
    if (!document.activeElement?.closest(".side-panel")) row.focus({ preventScroll: true });
    row.classList.add("row-highlight");
    setTimeout(() => row.classList.remove("row-highlight"), HIGHLIGHT_MS);
  }

  private onResize(entries: readonly ResizeObserverEntry[]): void {
    let news = false;
    for (const { target, borderBoxSize } of entries) {
      const key = (target as HTMLElement).dataset.key;
      if (key !== undefined) news = this.heights.record(key, borderBoxSize[0]!.blockSize) || news;
    }
    this.heightPx = this.box?.clientHeight ?? 0;
    if (news) this.starts = rowOffsets(this.path.map((message) => this.heights.of(message)));
    this.restorePosition();
    this.refresh();
  }

  /** Ask for a new drawing if other rows are wanted than there are. */
  private refresh(): void {
    const wanted = this.wantedRows();
    if (wanted.length !== this.shown.length || wanted.some((index, at) => index !== this.shown[at])) this.redraw();
  }

  private redraw(): void {
    this.version.value = this.version.peek() + 1; // without reading: effects call this
  }

  private wantedRows(): number[] {
    const keep = [this.focused, this.anchor?.key].map((key) => this.path.findIndex((message) => message.key === key));
    return visibleRows(this.starts, this.topPx, this.heightPx, keep);
  }

  /** Note which row is at the top of the screen, and where exactly. */
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
