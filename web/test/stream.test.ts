import { beforeEach, describe, expect, it } from "vitest";
import { makeParser } from "../src/markdown/parser";
import { MarkdownStream, mend, openFence } from "../src/markdown/stream";
import { XSS } from "./corpus";

const md = makeParser();
let root: HTMLElement;

beforeEach(() => {
  root = document.createElement("div");
});

function oneShot(text: string): string {
  const other = document.createElement("div");
  new MarkdownStream(other, md).update(text, true);
  return other.innerHTML;
}

/** A small seeded generator, so that a failure names the cut that made it. */
function cuts(text: string, seed: number, longest = 7): string[] {
  const prefixes: string[] = [];
  let state = seed;
  for (let end = 0; end < text.length; ) {
    state = (state * 1103515245 + 12345) & 0x7fffffff;
    end = Math.min(text.length, end + 1 + (state % longest));
    prefixes.push(text.slice(0, end));
  }
  return prefixes;
}

const DOCUMENTS: Record<string, string> = {
  paragraphs: "One.\n\nTwo with **bold** and `code`.\n\nThree\nover two lines.",
  headings: "# Title\n\nText\n\nSetext\n------\n\n### Third\nend",
  "tight list": "Before\n\n1. a\n2. b\n3. c\n\nafter",
  "loose list": "1. a\n\n2. b\n\n3. c\n\nafter",
  "nested list": "- a\n  - b\n\n    more of b\n- c\n\nend",
  table: "Look:\n\n| a | b |\n|:--|--:|\n| 1 | 2 |\n| 3 | 4 |\n\nend",
  code: "Text\n\n```python\nfor x in y:\n\n    print(x)\n```\n\nend",
  "long fence": "````md\n```\ninner\n```\n````\nend",
  quote: "> a\n> b\n\n> c\n\nend",
  rule: "a\n\n---\n\nb\n\n***\nc",
  tasks: "- [ ] open\n- [x] done\n\nend",
  references: "See [this] first.\n\nAnd more.\n\n[this]: https://example.com\n",
  unclosed: "Some **bold that never ends\n\n```js\nlet a = 1;",
};

describe("MarkdownStream", () => {
  for (const [name, text] of Object.entries(DOCUMENTS)) {
    it(`ends like a single rendering however the text is cut: ${name}`, () => {
      for (let seed = 1; seed <= 3; seed++) {
        const box = document.createElement("div");
        const stream = new MarkdownStream(box, md);
        for (const prefix of cuts(text, seed)) stream.update(prefix, false);
        stream.update(text, true);
        expect(box.innerHTML, `seed ${seed}`).toBe(oneShot(text));
      }
    });
  }

  it("never touches a finished block again", () => {
    const stream = new MarkdownStream(root, md);
    stream.update("First.\n\nSec", false);
    const first = root.querySelector("p");
    stream.update("First.\n\nSecond.\n\n- third", false);
    expect(root.querySelector("p")).toBe(first);
  });

  it("grows a program inside the frame it already has", () => {
    const stream = new MarkdownStream(root, md);
    stream.update("```js\nlet", false);
    const frame = root.querySelector("figure");
    stream.update("```js\nlet a = 1;\nlet b", false);
    expect(root.querySelector("figure")).toBe(frame);
    expect(root.querySelector("code")!.textContent).toBe("let a = 1;\nlet b");
  });

  it("starts afresh when the text is another one", () => {
    const stream = new MarkdownStream(root, md);
    stream.update("One.\n\nTwo.", false);
    stream.update("Other.", true);
    expect(root.textContent!.trim()).toBe("Other.");
  });

  it("aligns columns by class, never by style", () => {
    new MarkdownStream(root, md).update("|a|b|\n|:-:|--:|\n|1|2|", true);
    expect(root.querySelector("[style]")).toBeNull();
    expect(root.querySelectorAll("td.align-center, td.align-right").length).toBe(2);
  });

  it("labels code and offers to copy it", () => {
    new MarkdownStream(root, md).update("```python\nx = 1\n```", true);
    expect(root.querySelector(".code-bar span")!.textContent).toBe("python");
    expect(root.querySelector("button.code-copy")).not.toBeNull();
  });

  it("opens links elsewhere, without a referrer", () => {
    new MarkdownStream(root, md).update("[a](https://example.com) and https://example.org", true);
    const links = [...root.querySelectorAll("a")];
    expect(links.map((link) => link.getAttribute("href"))).toEqual(["https://example.com", "https://example.org"]);
    for (const link of links) {
      expect(link.getAttribute("rel")).toBe("noopener noreferrer nofollow");
      expect(link.getAttribute("target")).toBe("_blank");
    }
  });
});

describe("hostile text", () => {
  const check = () => {
    expect(root.querySelector("script, img, svg, iframe, form, style, base, meta, math, object, embed")).toBeNull();
    for (const element of root.querySelectorAll("*")) {
      for (const attribute of element.attributes) {
        expect(attribute.name).not.toMatch(/^on|^style$|^src/i);
        if (attribute.name === "href") expect(attribute.value).toMatch(/^(https?:|mailto:)/i);
      }
    }
  };
  for (const text of XSS) {
    it(`stays text: ${text.slice(0, 40)}`, () => {
      const stream = new MarkdownStream(root, md);
      for (const prefix of cuts(text, 3, 40)) {
        stream.update(prefix, false);
        check();
      }
      stream.update(text, true);
      check();
    });
  }
});

describe("openFence", () => {
  it("sees whether the fence closed", () => {
    expect(openFence("```js\na\n")).toBe("a\n");
    expect(openFence("```js\na\n```")).toBeNull();
    expect(openFence("````\n```\n")).toBe("```\n");
    expect(openFence("text")).toBeNull();
  });
});

describe("mend", () => {
  it.each([
    ["a **b", "a **b**"],
    ["a **b*", "a **b**"],
    ["a **", "a "],
    ["a `b", "a `b`"],
    ["see [docs](https://exa", "see docs"],
    ["a **b** c", "a **b** c"],
    ["```js\n**", "```js\n**"],
  ])("%j becomes %j", (before, after) => expect(mend(before)).toBe(after));
});
