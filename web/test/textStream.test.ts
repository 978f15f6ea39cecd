import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { DrawPacer } from "../src/markdown/textStream";

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

describe("DrawPacer", () => {
  it("draws cheap texts immediately", () => {
    const pace = new DrawPacer();
    const drawn: string[] = [];
    for (const name of ["a", "b", "c"]) pace.schedule(pace, () => drawn.push(name));
    expect(drawn).toEqual(["a", "b", "c"]);
  });

  it("pauses after an expensive drawing, then draws the newest version of each text", () => {
    let now = 0;
    vi.spyOn(performance, "now").mockImplementation(() => now);
    const pace = new DrawPacer();
    const drawn: string[] = [];
    const draw = (name: string, ms: number) => () => {
      now += ms;
      drawn.push(name);
    };
    const [one, other] = [{}, {}];
    pace.schedule(one, draw("a", 3));
    for (const name of ["b", "c", "d"]) pace.schedule(one, draw(name, 3));
    pace.schedule(other, draw("x", 3));
    expect(drawn).toEqual(["a"]);
    now += 80;
    vi.advanceTimersByTime(80);
    expect(drawn).toEqual(["a", "d", "x"]);
  });

  it("pauses for 28 ms at most, however slow the machine", () => {
    let now = 0;
    vi.spyOn(performance, "now").mockImplementation(() => now);
    const pace = new DrawPacer();
    const drawn: string[] = [];
    pace.schedule(pace, () => (now += 50));
    pace.schedule(pace, () => drawn.push("next"));
    vi.advanceTimersByTime(27);
    expect(drawn).toEqual([]);
    vi.advanceTimersByTime(1);
    expect(drawn).toEqual(["next"]);
  });

  it("draws the final text without waiting", () => {
    const pace = new DrawPacer();
    const drawn: string[] = [];
    pace.schedule(pace, () => drawn.push("a"));
    pace.drawNow(pace, () => drawn.push("end"));
    vi.advanceTimersByTime(10_000);
    expect(drawn.at(-1)).toBe("end");
  });
});
