// Virtual list of messages: which rows of a long conversation are in the document. The others are replaced by space of
// about their height.
import type { Message } from "../../chat/tree";

// up to this length all rows are in the document, so that the browser's search finds them
export const MAX_UNVIRTUALIZED_ROWS = 80;
const OVERSCAN_SCREENS = 1.5; // screens above and below the viewport
const NUM_LAST_ROWS = 2; // the newest messages, needed by shortcuts and streams
const LINE_PX = 24;
const ROW_CHROME_PX = 64; // everything around the text: tools, statistics, margins
const LINE_CHARS = 84;
const DEFAULT_HEIGHT_PX = 800;

/** A rendered row, or a space that replaces rows. */
export type Slot = { readonly index: number } | { readonly spacePx: number; readonly before: number };

/** Row heights: measured, or estimated from the text. */
export class RowHeights {
  private readonly px = new Map<string, number>();

  of(message: Message): number {
    const cached = this.px.get(message.key);
    if (cached !== undefined) return cached;
    const guess = estimateHeight(message.text.peek());
    this.px.set(message.key, guess);
    return guess;
  }

  /** Record a measured height; true if it changed. */
  record(key: string, px: number): boolean {
    const old = this.px.get(key);
    this.px.set(key, px);
    return old === undefined || Math.abs(old - px) >= 1;
  }
}

export function estimateHeight(text: string): number {
  let lines = 0;
  for (const line of text.split("\n")) lines += Math.max(0.5, Math.ceil(line.length / LINE_CHARS));
  return ROW_CHROME_PX + lines * LINE_PX;
}

/** Return the offset of each row, and the total height as the last element. */
export function rowOffsets(heights: readonly number[]): number[] {
  const starts = [0];
  for (const height of heights) starts.push(starts.at(-1)! + height);
  return starts;
}

/** Return the indices of the rows to render for a viewport, in order. `keep` are always rendered. */
export function visibleRows(starts: readonly number[], top: number, height: number, keep: Iterable<number>): number[] {
  const count = starts.length - 1;
  if (count <= MAX_UNVIRTUALIZED_ROWS) return Array.from({ length: count }, (_, index) => index);
  const screen = height || DEFAULT_HEIGHT_PX;
  const at = Math.max(0, Math.min(top, starts[count]! - screen));
  const wanted = new Set<number>();
  const from = at - screen * OVERSCAN_SCREENS;
  const to = at + screen * (1 + OVERSCAN_SCREENS);
  for (let index = firstAfter(starts, from); index < count && starts[index]! < to; index++) wanted.add(index);
  for (const index of keep) if (index >= 0 && index < count) wanted.add(index);
  for (let index = count - NUM_LAST_ROWS; index < count; index++) wanted.add(index);
  return [...wanted].sort((a, b) => a - b);
}

/** Return the rows and the spaces between them. */
export function toSlots(rows: readonly number[], starts: readonly number[]): Slot[] {
  const slots: Slot[] = [];
  let next = 0;
  for (const index of rows) {
    if (index > next) slots.push({ spacePx: starts[index]! - starts[next]!, before: index });
    slots.push({ index });
    next = index + 1;
  }
  return slots;
}

/** Return the first row that ends below `y`. */
function firstAfter(starts: readonly number[], y: number): number {
  let low = 0;
  let high = starts.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[middle + 1]! > y) high = middle;
    else low = middle + 1;
  }
  return low;
}
