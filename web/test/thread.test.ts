import { describe, expect, it } from "vitest";
import { StaleCheck } from "../src/chat/thread";

describe("StaleCheck", () => {
  it("detects changes made elsewhere, in whatever order own changes are recorded", () => {
    const check = new StaleCheck();
    check.markRead(3);
    expect(check.isStale(3)).toBe(false);
    expect(check.isStale(4)).toBe(true);
    check.markSeen(5); // own change, but revision 4 is not
    expect(check.isStale(5)).toBe(true);
    check.markSeen(4);
    expect(check.isStale(5)).toBe(false);
    check.markRead(9);
    check.markSeen(7);
    expect(check.isStale(9)).toBe(false);
    expect(check.isStale(10)).toBe(true);
  });

  it("agrees with a list of seen check", () => {
    let seed = 7;
    const random = (below: number) => {
      seed = (seed * 48271) % 2147483647;
      return seed % below;
    };
    for (let round = 0; round < 200; round++) {
      const check = new StaleCheck();
      const seen = new Set<number>();
      for (let step = 0; step < 20; step++) {
        const rev = 1 + random(12);
        if (random(5) === 0) {
          check.markRead(rev);
          for (let below = 1; below <= rev; below++) seen.add(below);
        } else {
          check.markSeen(rev);
          seen.add(rev);
        }
        for (let head = 1; head <= 13; head++) {
          const news = Array.from({ length: head }, (_, at) => at + 1).some((below) => !seen.has(below));
          expect(check.isStale(head)).toBe(news);
        }
      }
    }
  });
});
