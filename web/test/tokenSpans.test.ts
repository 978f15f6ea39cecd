import { describe, expect, it } from "vitest";
import { rankChoices } from "../src/chat/tokenChoices";
import { toTokenSpans } from "../src/chat/tokenInspector";

const token = (index: number, start: number | null, end: number | null) => ({ index, start, end });

describe("toTokenSpans", () => {
  it("counts characters like the API, not UTF-16 units", () => {
    const spans = toTokenSpans("a😀bé", [token(0, 0, 1), token(1, 1, 1), token(2, 1, 2), token(3, 2, 4)]);
    expect(spans).toEqual([
      { index: 0, text: "a", start: 0 },
      { index: 2, text: "😀", start: 1 }, // two tokens: the last one shows it
      { index: 3, text: "bé", start: 3 },
    ]);
  });
  it("leaves out tokens without text and keeps the original indices", () => {
    expect(
      toTokenSpans("ab", [token(0, null, null), token(1, 0, 1), token(2, 1, 2), token(3, null, null)]).map(
        (span) => span.index,
      ),
    ).toEqual([1, 2]);
  });
});

describe("rankChoices", () => {
  const alternative = (id: number, probability: number) => ({
    id,
    text: `t${id}`,
    logprob: Math.log(probability),
    probability,
    ends: false,
  });
  const found = (id: number, rank: number | null) => ({
    index: 3,
    token: { ...alternative(id, 0.01), rank },
    alternatives: [alternative(7, 0.6), alternative(9, 0.3)],
    usage: { input_tokens: 4, cached_tokens: 3, copied_pages: 0 },
  });
  it("marks the original token", () => {
    expect(rankChoices(found(9, 2)).map((choice) => [choice.id, choice.rank, choice.isOriginal])).toEqual([
      [7, 1, false],
      [9, 2, true],
    ]);
  });
  it("adds the original token if it is not among the most likely ones", () => {
    expect(rankChoices(found(5, 40)).map((choice) => [choice.id, choice.rank, choice.isOriginal])).toEqual([
      [7, 1, false],
      [9, 2, false],
      [5, 40, true],
    ]);
  });
});
