// @vitest-environment jsdom
import { describe, expect, it } from "vitest";
import { type Word, wordOffset } from "../src/ui/thread/wordAtPoint";

describe("wordOffset", () => {
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
  it("finds the same occurrence of a word in the markdown source", () => {
    const source = "# The fox\n\nA **fox** and a `fox`.";
    const root = drawn("<h1>The fox</h1><p>A <strong>fox</strong> and a <code>fox</code>.</p>");
    expect([0, 1, 2].map((nth) => wordOffset(source, root, word(root, "fox", nth)))).toEqual([
      6,
      source.indexOf("fox**"),
      source.indexOf("fox`"),
    ]);
  });
  it("returns null if the rendered text and the source have different words", () => {
    const root = drawn('<p>see <a href="https://fox.example">fox</a></p>');
    expect(wordOffset("see [fox](https://fox.example)", root, word(root, "fox", 0))).toBeNull();
  });
});
