import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { DrawPacer } from "../src/markdown/textStream";

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

describe("Pace", () => {
  it("draws at once what is cheap", () => {
    const pace = new DrawPacer();
    const drawn: string[] = [];
    for (const name of ["a", "b", "c"]) pace.schedule(pace, () => drawn.push(name));
    expect(drawn).toEqual(["a", "b", "c"]);
  });

  it("rests after what took long, then draws the newest of every text", () => {
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
    now += 117;
    vi.advanceTimersByTime(117);
    expect(drawn).toEqual(["a", "d", "x"]);
  });

  it("does not let the last word wait", () => {
    const pace = new DrawPacer();
    const drawn: string[] = [];
    pace.schedule(pace, () => drawn.push("a"));
    pace.drawNow(pace, () => drawn.push("end"));
    vi.advanceTimersByTime(10_000);
    expect(drawn.at(-1)).toBe("end");
  });
});
