import { afterEach, describe, expect, it, vi } from "vitest";
import { watchWake } from "../src/api/socket";
import { fakeBrowser } from "./fakes";

describe("sleep", () => {
  afterEach(() => {
    vi.useRealTimers();
    vi.unstubAllGlobals();
  });

  it("is noticed by a clock that jumped, once, and not by time that passed", () => {
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
