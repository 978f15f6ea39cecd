import { commonPrefix } from "../src/app/format";
import { BOX, PAGE_STATES, changedPath, columnsFor, countStates, numDrawn, pagePaths } from "../src/draw/pages";
import { KvPageMapPoller } from "../src/server/cacheCoverage";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";

const CELLS = "sapiof".repeat(20);

describe("the page map", () => {
  test("every cell is drawn once, in its state's shape and at its place", () => {
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

  test("states have shapes of their own, and are counted", () => {
    expect(new Set(PAGE_STATES.map(({ shape }) => shape)).size).toBe(PAGE_STATES.length);
    expect([...countStates(`${CELLS}?ss`)].map(([name, count]) => [name, count])).toEqual([
      ["shared", 22], ["held", 20], ["pinned", 20], ["idle", 20], ["other", 20], ["free", 20],
    ]);
    expect(countStates("").get("free")).toBe(0);
  });

  test("what changed is told, unless the pool is another one", () => {
    expect(changedPath("faaf", "ffaf", 2)).toBe("M10 0h10v10h-10z");
    expect(changedPath("faaf", "faaf", 2)).toBe("");
    expect(changedPath("faaf", "", 2)).toBe("");
  });

  test("free cells at the end are left out by halves", () => {
    expect(numDrawn("f".repeat(4096))).toBe(256);
    expect(numDrawn("s" + "f".repeat(99))).toBe(100);
    expect(numDrawn("f".repeat(256) + "i" + "f".repeat(3839))).toBe(512);
    expect(numDrawn("f".repeat(4095) + "i")).toBe(4096);
    expect(numDrawn("")).toBe(0);
  });

  test("a map is about as wide as high, up to 64 cells", () => {
    expect([1, 64, 100, 4096].map(columnsFor)).toEqual([8, 8, 10, 64]);
  });
});

describe("looking at it", () => {
  let asked = 0;
  let hidden = false;
  const answer = (cells: string) => new Response(JSON.stringify({ page_size: 16, num_pages: 2, pages_per_cell: 1, cells }));
  const show = (is: boolean) => {
    hidden = !is;
    document.dispatchEvent(new Event("visibilitychange"));
  };

  beforeEach(() => {
    vi.useFakeTimers();
    [asked, hidden] = [0, false];
    vi.spyOn(document, "hidden", "get").mockImplementation(() => hidden);
    vi.stubGlobal("fetch", async () => answer(["fa", "aa"][asked++ % 2]!));
  });
  afterEach(() => {
    vi.useRealTimers();
    vi.restoreAllMocks();
    vi.unstubAllGlobals();
  });

  test("once a second, with what was there before, until nobody looks", async () => {
    const watch = new KvPageMapPoller();
    const stop = watch.start();
    await vi.advanceTimersByTimeAsync(2500);
    expect(asked).toBe(3);
    expect([watch.current.value?.cells, watch.previousCells.value]).toEqual(["fa", "aa"]);
    stop();
    await vi.advanceTimersByTimeAsync(5000);
    expect(asked).toBe(3);
  });

  test("not while the tab is hidden, and at once when it is back", async () => {
    const watch = new KvPageMapPoller();
    const stop = watch.start();
    await vi.advanceTimersByTimeAsync(100);
    show(false);
    await vi.advanceTimersByTimeAsync(5000);
    expect(asked).toBe(1);
    show(true);
    await vi.advanceTimersByTimeAsync(100);
    expect(asked).toBe(2);
    await vi.advanceTimersByTimeAsync(1000);
    expect(asked).toBe(3);
    stop();
  });

  test("an answer that comes after the end asks for no other", async () => {
    const watch = new KvPageMapPoller();
    watch.start()(); // looked, and gone before the answer
    await vi.advanceTimersByTimeAsync(5000);
    expect(asked).toBe(1);
  });

  test("a failure is told, the last map stays, and it goes on asking", async () => {
    const watch = new KvPageMapPoller();
    const stop = watch.start();
    await vi.advanceTimersByTimeAsync(100);
    const works = globalThis.fetch;
    vi.stubGlobal("fetch", () => Promise.reject(new Error("no network")));
    await vi.advanceTimersByTimeAsync(1000);
    expect([watch.error.value, watch.current.value?.cells]).toEqual(["no network", "fa"]);
    vi.stubGlobal("fetch", works);
    await vi.advanceTimersByTimeAsync(1000);
    expect([watch.error.value, watch.current.value?.cells]).toEqual([null, "aa"]);
    stop();
  });
});

test("what several answers share is told up to a whole word", () => {
  expect(commonPrefix(["Once upon a time", "Once upon a hill"])).toBe("Once upon a ");
  expect(commonPrefix(["Once upon", "Once under"])).toBe("Once ");
  expect(commonPrefix(["Once", "Once more"])).toBe("Once");
  expect(commonPrefix(["One", "Two"])).toBe("");
  expect(commonPrefix(["same", "same"])).toBe("same");
  expect(commonPrefix([])).toBe("");
});
