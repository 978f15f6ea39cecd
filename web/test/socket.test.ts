import { afterEach, describe, expect, it, vi } from "vitest";
import { watchWake } from "../src/api/socket";
import { fakeBrowser } from "./fakes";

describe("watchWake", () => {
  afterEach(() => {
    vi.useRealTimers();
    vi.unstubAllGlobals();
  });

  it("fires once when the clock jumps, and not for time that passes normally", () => {
    vi.useFakeTimers();
    const woke = vi.fn();
    fakeBrowser();
    watchWake(woke);
    vi.advanceTimersByTime(120_000);
    expect(woke).not.toHaveBeenCalled();
    vi.setSystemTime(Date.now() + 3_600_000);
    vi.advanceTimersByTime(20_000);
    expect(woke).toHaveBeenCalledTimes(1);
  });
});
