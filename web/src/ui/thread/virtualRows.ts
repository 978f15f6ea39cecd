// Which messages of a long conversation are in the document: those on screen, some around them, and the few that must
// stay reachable. The rest is empty space of about their height.
import type { Message } from "../../chat/tree";

export const MAX_UNVIRTUALIZED_ROWS = 80; // a thread of up to so many messages is there as a whole: the browser's own search finds everything
const OVERSCAN_SCREENS = 1.5; // screens above and below
const NUM_LAST_ROWS = 2; // the newest messages, so that shortcuts and streams find them
const LINE_PX = 24;
const ROW_CHROME_PX = 64; // what surrounds a text: tools, figures, distances
const LINE_CHARS = 84;
const DEFAULT_HEIGHT_PX = 800;

/** What a row is: a message, or the height in pixels that left-out messages take. */
export type Slot = { readonly index: number } | { readonly spacePx: number; readonly before: number };

/** Heights of messages: as measured, or as a guess from their text until they were. */
export class RowHeights {
  private readonly px = new Map<string, number>();

  of(message: Message): number {
    const known = this.px.get(message.key);
    if (known !== undefined) return known;
    const guess = estimateHeight(message.text.peek());
    this.px.set(message.key, guess);
    return guess;
  }

  /** Take a measured height. True if it is news. */
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

/** Where each row begins, and in the last place where all end. */
export function rowOffsets(heights: readonly number[]): number[] {
  const starts = [0];
  for (const height of heights) starts.push(starts.at(-1)! + height);
  return starts;
}

/** Indices of the rows to have when the reader looks at `top` to `top + height`, in order. `keep` are had anyway. */
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

/** Rows, and the spaces between them. */
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

/** The first row that ends below `y`. */
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
