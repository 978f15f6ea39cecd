// @vitest-environment node
import { toCells } from "../src/ui/thread/AnswerStats";
import { describe, expect, it } from "vitest";

const cells = (inputTokens: number, cachedTokens: number) => toCells({ inputTokens, cachedTokens, outputTokens: 0 });

describe("cellsOf", () => {
  it("draws one cell per 16 tokens, cached ones first", () => {
    expect(cells(40, 32)).toEqual({ tokens: 16, kinds: ["cached", "cached", "computed"] });
  });
  it("draws a cell as most of its tokens are, however few it stands for", () => {
    expect(cells(39, 38).kinds).toEqual(["cached", "cached", "cached"]);
    expect(cells(39, 34).kinds).toEqual(["cached", "cached", "computed"]);
    expect(cells(20, 0).kinds).toEqual(["computed", "computed"]);
  });
  it("draws at most 32 cells however long the prompt", () => {
    for (const tokens of [511, 512, 513, 5000, 131072]) expect(cells(tokens, 0).kinds.length).toBeLessThanOrEqual(32);
  });
  it("draws something for a tiny prompt", () => {
    expect(cells(1, 0).kinds).toEqual(["computed"]);
  });
});
