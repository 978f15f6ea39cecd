import { describe, expect, it } from "vitest";
import { formatPercent, showWhitespace } from "../src/app/format";
import { describeMiss, isExpectedMiss, prefilledTokens, toCells } from "../src/ui/thread/AnswerStats";

const cells = (inputTokens: number, cachedTokens: number) => toCells({ inputTokens, cachedTokens, outputTokens: 0 });

describe("toCells", () => {
  it("returns one cell per 16 tokens, cached ones first", () => {
    expect(cells(40, 32)).toEqual({ tokens: 16, kinds: ["cached", "cached", "computed"] });
  });
  it("gives a cell the kind of most of its tokens, also if the cell is partial", () => {
    expect(cells(39, 38).kinds).toEqual(["cached", "cached", "cached"]);
    expect(cells(39, 34).kinds).toEqual(["cached", "cached", "computed"]);
    expect(cells(20, 0).kinds).toEqual(["computed", "computed"]);
  });
  it("returns at most 32 cells for any prompt length", () => {
    for (const tokens of [511, 512, 513, 5000, 131072]) expect(cells(tokens, 0).kinds.length).toBeLessThanOrEqual(32);
  });
  it("returns one cell for a prompt of one token", () => {
    expect(cells(1, 0).kinds).toEqual(["computed"]);
  });
});

describe("display of statistics", () => {
  it("formatPercent keeps enough digits to tell shares apart", () => {
    expect([1, 0.414, 0.0961, 0.0012, 0.0000001].map(formatPercent)).toEqual([
      "100 %",
      "41 %",
      "9.6 %",
      "0.1 %",
      "< 0.1 %",
    ]);
  });
  it("showWhitespace replaces leading and trailing white space", () => {
    expect([" the", "\n\n", "", "a b"].map(showWhitespace)).toEqual(["·the", "↵↵", "(nothing)", "a b"]);
  });
  it("prefilledTokens does not count the step that samples the next token", () => {
    const usage = { inputTokens: 37, cachedTokens: 36, outputTokens: 5 };
    expect(prefilledTokens(usage)).toBe(0);
    expect(prefilledTokens({ ...usage, cachedTokens: 20 })).toBe(16);
  });
  it("describeMiss names the position and the reason", () => {
    expect(describeMiss({ reason: "evicted", at_token: 32, detail: "" })).toBe(
      "computed from token 32: its place in the cache was needed for other texts",
    );
    expect(describeMiss({ reason: "of_tomorrow", at_token: 0, detail: "" })).toBe("computed from token 0: of_tomorrow");
  });
});

describe("isExpectedMiss", () => {
  it("is true for new text and for a text that differs, which no cache could hold", () => {
    const expected = ["never_computed", "diverged", "evicted", "no_state", "template_changed"].filter((reason) =>
      isExpectedMiss({ reason, at_token: 9, detail: "" } as Parameters<typeof isExpectedMiss>[0]),
    );
    expect(expected).toEqual(["never_computed", "diverged"]);
  });
});
