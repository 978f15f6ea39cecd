import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { getCacheMap } from "../src/api/rest";
import { Poller } from "../src/server/poller";
import { type FakeDocument, fakeBrowser } from "./fakes";

describe("Poller", () => {
  let asked = 0;
  let page: FakeDocument;
  const answer = (cells: string) =>
    new Response(JSON.stringify({ page_size: 16, num_pages: 2, pages_per_cell: 1, cells }));
  const show = (is: boolean) => {
    page.hidden = !is;
    page.dispatchEvent(new Event("visibilitychange"));
  };

  beforeEach(() => {
    vi.useFakeTimers();
    asked = 0;
    page = fakeBrowser();
    vi.stubGlobal("fetch", async () => answer(["fa", "aa"][asked++ % 2]!));
  });
  afterEach(() => {
    vi.useRealTimers();
    vi.restoreAllMocks();
    vi.unstubAllGlobals();
  });

  test("polls once a second, keeping the previous value, until it is stopped", async () => {
    const poller = new Poller(getCacheMap, 1000);
    const stop = poller.start();
    await vi.advanceTimersByTimeAsync(2500);
    expect(asked).toBe(3);
    expect([poller.current.value?.cells, poller.previous.value?.cells]).toEqual(["fa", "aa"]);
    stop();
    await vi.advanceTimersByTimeAsync(5000);
    expect(asked).toBe(3);
  });

  test("pauses while the tab is hidden and polls immediately afterwards", async () => {
    const poller = new Poller(getCacheMap, 1000);
    const stop = poller.start();
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

  test("does not poll again if it was stopped during a request", async () => {
    const poller = new Poller(getCacheMap, 1000);
    poller.start()(); // stopped before the response arrives
    await vi.advanceTimersByTimeAsync(5000);
    expect(asked).toBe(1);
  });

  test("keeps the last value after an error and continues polling", async () => {
    const poller = new Poller(getCacheMap, 1000);
    const stop = poller.start();
    await vi.advanceTimersByTimeAsync(100);
    const works = globalThis.fetch;
    vi.stubGlobal("fetch", () => Promise.reject(new Error("no network")));
    await vi.advanceTimersByTimeAsync(1000);
    expect([poller.error.value, poller.current.value?.cells]).toEqual(["no network", "fa"]);
    vi.stubGlobal("fetch", works);
    await vi.advanceTimersByTimeAsync(1000);
    expect([poller.error.value, poller.current.value?.cells]).toEqual([null, "aa"]);
    stop();
  });
});
