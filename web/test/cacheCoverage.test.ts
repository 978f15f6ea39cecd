import { afterEach, beforeEach, describe, expect, it, test, vi } from "vitest";
import { describeCoverage, KvPageMapPoller } from "../src/server/cacheCoverage";
import { type FakeDocument, fakeBrowser } from "./fakes";

describe("describeCoverage", () => {
  it("names the level and the counts", () => {
    const of = (tokens: number, cached_tokens: number) =>
      describeCoverage({ conversation_id: "c", tokens, cached_tokens });
    expect(of(1234, 1233)).toEqual({ level: "warm", text: "Warm: 1,233 of 1,234 tokens are cached" });
    expect(of(400, 100).level).toBe("partly");
    expect(of(400, 3).level).toBe("cold");
    expect(of(0, 0).level).toBe("cold");
  });
});

describe("KvPageMapPoller", () => {
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

  test("polls once a second, keeping the previous cells, until it is stopped", async () => {
    const poller = new KvPageMapPoller();
    const stop = poller.start();
    await vi.advanceTimersByTimeAsync(2500);
    expect(asked).toBe(3);
    expect([poller.current.value?.cells, poller.previousCells.value]).toEqual(["fa", "aa"]);
    stop();
    await vi.advanceTimersByTimeAsync(5000);
    expect(asked).toBe(3);
  });

  test("pauses while the tab is hidden and polls immediately afterwards", async () => {
    const poller = new KvPageMapPoller();
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
    const poller = new KvPageMapPoller();
    poller.start()(); // stopped before the response arrives
    await vi.advanceTimersByTimeAsync(5000);
    expect(asked).toBe(1);
  });

  test("keeps the last map after an error and continues polling", async () => {
    const poller = new KvPageMapPoller();
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
