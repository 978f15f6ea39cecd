import { formatPercent, showWhitespace } from "../src/app/format";
import { rankChoices, toTokenSpans } from "../src/chat/tokenFork";
import { describeMiss, prefilledTokens } from "../src/ui/thread/AnswerStats";
import { type Word, wordOffset } from "../src/ui/thread/wordAtPoint";
import { describe, expect, it } from "vitest";

const token = (index: number, start: number | null, end: number | null) => ({ index, start, end });

describe("spansOf", () => {
  it("counts characters as the wire does, not as strings here do", () => {
    const spans = toTokenSpans("a😀bé", [token(0, 0, 1), token(1, 1, 1), token(2, 1, 2), token(3, 2, 4)]);
    expect(spans).toEqual([
      { index: 0, text: "a", start: 0 },
      { index: 2, text: "😀", start: 1 }, // of two tokens: the last has it
      { index: 3, text: "bé", start: 3 },
    ]);
  });
  it("leaves out what shows nothing, and keeps everybody's own index", () => {
    expect(toTokenSpans("ab", [token(0, null, null), token(1, 0, 1), token(2, 1, 2), token(3, null, null)]).map((span) => span.index)).toEqual([1, 2]);
  });
});

describe("choicesOf", () => {
  const alternative = (id: number, probability: number) => ({ id, text: `t${id}`, logprob: Math.log(probability), probability, ends: false });
  const found = (id: number, rank: number | null) => ({
    index: 3,
    token: { ...alternative(id, 0.01), rank },
    alternatives: [alternative(7, 0.6), alternative(9, 0.3)],
    usage: { input_tokens: 4, cached_tokens: 3, copied_pages: 0 },
  });
  it("marks what was said", () => {
    expect(rankChoices(found(9, 2)).map((choice) => [choice.id, choice.rank, choice.isOriginal])).toEqual([[7, 1, false], [9, 2, true]]);
  });
  it("adds what was said where it is none of the likeliest", () => {
    expect(rankChoices(found(5, 40)).map((choice) => [choice.id, choice.rank, choice.isOriginal])).toEqual([[7, 1, false], [9, 2, false], [5, 40, true]]);
  });
});

describe("figures in words", () => {
  it("writes shares that can be told apart", () => {
    expect([1, 0.414, 0.0961, 0.0012, 0.0000001].map(formatPercent)).toEqual(["100 %", "41 %", "9.6 %", "0.1 %", "< 0.1 %"]);
  });
  it("shows white space", () => {
    expect([" the", "\n\n", "", "a b"].map(showWhitespace)).toEqual(["·the", "↵↵", "(nothing)", "a b"]);
  });
  it("does not call the step that writes the next token prefill", () => {
    const usage = { inputTokens: 37, cachedTokens: 36, outputTokens: 5 };
    expect(prefilledTokens(usage)).toBe(0);
    expect(prefilledTokens({ ...usage, cachedTokens: 20 })).toBe(16);
  });
  it("says why the first miss", () => {
    expect(describeMiss({ reason: "evicted", at_token: 32, detail: "" })).toBe("from token 32: evicted: its pages were needed elsewhere");
    expect(describeMiss({ reason: "of_tomorrow", at_token: 0, detail: "" })).toBe("from token 0: of_tomorrow");
  });
});

describe("offsetIn", () => {
  function word(root: HTMLElement, text: string, nth: number): Word {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(), seen = 0; node; node = walker.nextNode()) {
      for (const match of (node.textContent ?? "").matchAll(new RegExp(`\\b${text}\\b`, "g"))) {
        if (seen++ !== nth) continue;
        const range = document.createRange();
        range.setStart(node, match.index);
        return { text, range };
      }
    }
    throw new Error(`no ${text}`);
  }
  function drawn(html: string): HTMLElement {
    const root = document.createElement("div");
    root.innerHTML = html;
    return root;
  }
  it("finds the same word of the same place under markdown", () => {
    const source = "# The fox\n\nA **fox** and a `fox`.";
    const root = drawn("<h1>The fox</h1><p>A <strong>fox</strong> and a <code>fox</code>.</p>");
    expect([0, 1, 2].map((nth) => wordOffset(source, root, word(root, "fox", nth)))).toEqual([6, source.indexOf("fox**"), source.indexOf("fox`")]);
  });
  it("says nothing where the drawing has other words than the text", () => {
    const root = drawn('<p>see <a href="https://fox.example">fox</a></p>');
    expect(wordOffset("see [fox](https://fox.example)", root, word(root, "fox", 0))).toBeNull();
  });
});
