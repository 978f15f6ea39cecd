import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { Pace } from "../src/markdown/pace";

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());


describe("Pace", () => {
  it("draws at once what is cheap", () => {
    const pace = new Pace();
    const drawn: string[] = [];
    for (const name of ["a", "b", "c"]) pace.request(pace, () => drawn.push(name));
    expect(drawn).toEqual(["a", "b", "c"]);
  });

  it("rests after what took long, then draws the newest of every text", () => {
    let now = 0;
    vi.spyOn(performance, "now").mockImplementation(() => now);
    const pace = new Pace();
    const drawn: string[] = [];
    const draw = (name: string, ms: number) => () => {
      now += ms;
      drawn.push(name);
    };
    const [one, other] = [{}, {}];
    pace.request(one, draw("a", 3));
    for (const name of ["b", "c", "d"]) pace.request(one, draw(name, 3));
    pace.request(other, draw("x", 3));
    expect(drawn).toEqual(["a"]);
    now += 117;
    vi.advanceTimersByTime(117);
    expect(drawn).toEqual(["a", "d", "x"]);
  });

  it("does not let the last word wait", () => {
    const pace = new Pace();
    const drawn: string[] = [];
    pace.request(pace, () => drawn.push("a"));
    pace.now(pace, () => drawn.push("end"));
    vi.advanceTimersByTime(10_000);
    expect(drawn.at(-1)).toBe("end");
  });
});
