import { describe, expect, it } from "vitest";
import { Tree } from "../src/chat/tree";
import {
  estimateHeight,
  MAX_UNVIRTUALIZED_ROWS,
  RowHeights,
  rowOffsets,
  toSlots,
  visibleRows,
} from "../src/ui/thread/virtualRows";

const starts = (count: number, px = 100) => rowOffsets(Array.from({ length: count }, () => px));

describe("visibleRows", () => {
  it("returns all rows of a short thread", () => {
    expect(visibleRows(starts(MAX_UNVIRTUALIZED_ROWS), 0, 500, [])).toEqual(
      Array.from({ length: MAX_UNVIRTUALIZED_ROWS }, (_, index) => index),
    );
  });

  it("returns the rows around the viewport, the last two, and those to keep", () => {
    const rows = visibleRows(starts(1000), 50_000, 500, [3, -1, 5000]);
    for (let index = 500; index <= 504; index++) expect(rows).toContain(index);
    expect(rows[0]).toBe(3);
    expect(rows.slice(-2)).toEqual([998, 999]);
    expect(rows.length).toBeLessThan(30);
    expect(rows).toEqual([...rows].sort((a, b) => a - b));
  });

  it("agrees with a linear search at any scroll position", () => {
    const heights = Array.from({ length: 300 }, (_, index) => 20 + ((index * 7919) % 400));
    const all = rowOffsets(heights);
    for (let top = -100; top < all.at(-1)! + 1000; top += 977) {
      const at = Math.max(0, Math.min(top, all.at(-1)! - 600));
      const brute = heights.flatMap((height, index) => {
        const near = all[index]! + height > at - 900 && all[index]! < at + 1500;
        return near || index >= 298 ? [index] : [];
      });
      expect(visibleRows(all, top, 600, []), `top ${top}`).toEqual(brute);
    }
  });

  it("starts at the end", () => {
    expect(visibleRows(starts(1000), Infinity, 500, []).at(-1)).toBe(999);
    expect(visibleRows(starts(1000), Infinity, 0, []).length).toBeLessThan(40);
  });
});

describe("toSlots", () => {
  it("fills the gaps with space of the same height", () => {
    const at = rowOffsets([10, 20, 30, 40, 50]);
    expect(toSlots([1, 4], at)).toEqual([
      { spacePx: 10, before: 1 },
      { index: 1 },
      { spacePx: 70, before: 4 },
      { index: 4 },
    ]);
    expect(toSlots([], at)).toEqual([]);
  });
});

describe("RowHeights", () => {
  it("estimates from the text until a row is measured", () => {
    const message = new Tree().add({ key: "a", parent: null, role: "user", text: "x".repeat(1000) });
    const heights = new RowHeights();
    expect(heights.of(message)).toBe(estimateHeight(message.text.value));
    expect(estimateHeight("x".repeat(1000))).toBeGreaterThan(estimateHeight("x"));
    expect(heights.record("a", 321)).toBe(true);
    expect(heights.record("a", 321.4)).toBe(false);
    expect(heights.of(message)).toBe(321.4);
  });
});
