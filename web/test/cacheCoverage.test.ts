import { describe, expect, it } from "vitest";
import { describeCoverage } from "../src/server/cacheCoverage";

describe("describeCoverage", () => {
  it("names the level and the counts", () => {
    const of = (tokens: number, cached_tokens: number) =>
      describeCoverage({ conversation_id: "c", tokens, cached_tokens });
    expect(of(1234, 1233)).toEqual({ level: "warm", text: "Cached: 1,233 of 1,234 tokens" });
    expect(of(400, 100).level).toBe("partly");
    expect(of(400, 3).level).toBe("cold");
    expect(of(0, 0).level).toBe("cold");
  });
});
