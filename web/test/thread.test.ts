import { describe, expect, it } from "vitest";
import { StaleCheck } from "../src/chat/thread";

describe("Revisions", () => {
  it("tells what others changed, in whatever order our own changes are heard of", () => {
    const revisions = new StaleCheck();
    revisions.markRead(3);
    expect(revisions.isStale(3)).toBe(false);
    expect(revisions.isStale(4)).toBe(true);
    revisions.markSeen(5); // ours, but 4 was not
    expect(revisions.isStale(5)).toBe(true);
    revisions.markSeen(4);
    expect(revisions.isStale(5)).toBe(false);
    revisions.markRead(9);
    revisions.markSeen(7);
    expect(revisions.isStale(9)).toBe(false);
    expect(revisions.isStale(10)).toBe(true);
  });

  it("agrees with a list of what was seen", () => {
    let seed = 7;
    const random = (below: number) => {
      seed = (seed * 48271) % 2147483647;
      return seed % below;
    };
    for (let round = 0; round < 200; round++) {
      const revisions = new StaleCheck();
      const seen = new Set<number>();
      for (let step = 0; step < 20; step++) {
        const rev = 1 + random(12);
        if (random(5) === 0) {
          revisions.markRead(rev);
          for (let below = 1; below <= rev; below++) seen.add(below);
        } else {
          revisions.markSeen(rev);
          seen.add(rev);
        }
        for (let head = 1; head <= 13; head++) {
          const news = Array.from({ length: head }, (_, at) => at + 1).some((below) => !seen.has(below));
          expect(revisions.isStale(head)).toBe(news);
        }
      }
    }
  });
});
