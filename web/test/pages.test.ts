import { describe, expect, test } from "vitest";
import { BOX, changedPath, columnsFor, countStates, numDrawn, PAGE_STATES, pagePaths } from "../src/draw/pages";

const CELLS = "sapiof".repeat(20);

describe("page map", () => {
  test("pagePaths draws each cell once, with the shape of its state at its position", () => {
    const columns = 11;
    const paths = pagePaths(CELLS, columns);
    const drawn = PAGE_STATES.flatMap(({ name, code, shape }) => {
      const pieces = paths.get(name)!.split("M").slice(1);
      return pieces.map((piece) => {
        const [, x, y] = /^(\d+) (\d+)/.exec(piece)!;
        expect(piece.endsWith(shape)).toBe(true);
        const at = (Number(y) / BOX) * columns + Number(x) / BOX;
        expect(CELLS[at]).toBe(code);
        return at;
      });
    });
    expect(drawn.sort((a, b) => a - b)).toEqual([...CELLS].map((_, index) => index));
  });

  test("states have distinct shapes and are counted", () => {
    expect(new Set(PAGE_STATES.map(({ shape }) => shape)).size).toBe(PAGE_STATES.length);
    expect([...countStates(`${CELLS}?ss`)].map(([name, count]) => [name, count])).toEqual([
      ["shared", 22],
      ["active", 20],
      ["pinned", 20],
      ["idle", 20],
      ["other", 20],
      ["free", 20],
    ]);
    expect(countStates("").get("free")).toBe(0);
  });

  test("changedPath returns the changed cells, and nothing if the number of pages changed", () => {
    expect(changedPath("faaf", "ffaf", 2)).toBe("M10 0h10v10h-10z");
    expect(changedPath("faaf", "faaf", 2)).toBe("");
    expect(changedPath("faaf", "", 2)).toBe("");
  });

  test("numDrawn halves the map while its end is free", () => {
    expect(numDrawn("f".repeat(4096))).toBe(256);
    expect(numDrawn(`s${"f".repeat(99)}`)).toBe(100);
    expect(numDrawn(`${"f".repeat(256)}i${"f".repeat(3839)}`)).toBe(512);
    expect(numDrawn(`${"f".repeat(4095)}i`)).toBe(4096);
    expect(numDrawn("")).toBe(0);
  });

  test("columnsFor makes the map roughly square, up to 64 columns", () => {
    expect([1, 64, 100, 4096].map(columnsFor)).toEqual([8, 8, 10, 64]);
  });
});
