// @vitest-environment jsdom
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { makeParser, sanitize } from "../src/markdown/parser";
import { closeOpenMarkup, MarkdownStream, openFence } from "../src/markdown/renderer";
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

/** Split a text at pseudo-random positions; the seed identifies a failing split. */
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
  footnotes: "One[^a] and[^b] one[^a].\n\nMore[^c], x^[2].\n\n[^a]: First *note*\n[^b]: Second\n\n[^unused]: No\n\nend",
  references: "See [this] first.\n\nAnd more.\n\n[this]: https://example.com\n",
  math: "Let $x$ be\n$$\n a\n+ y\n= z\n$$\nand \\[ b \\]\n\n\\[\n- c\n\\]\n\n$$\nend\n\nof it",
  "references without spaces": "See [this] first.\n\nAnd more.\n\n[this]:https://example.com\n",
  money: "It costs $5.\n\nOr $10 to $20 (a *month*).\n\n- $1\n- $2\n\nend $3",
  "no formula after all": "We have\n$$\nof them\n\nend\n\n- one\n$$\n- two\n\nend",
  badge: "[![a](https://example.com/a.svg)](https://example.com) ![b](https://example.com/b.png)\n\nend",
  returns: "One\r\n\r\n```\r\ncode\r\n```\r\n\r\nend",
  "html and entities": "<b>no</b> &ouml; &#35; &amp;\n\n<div>\n\nend",
  unclosed: "Some **bold that never ends\n\n```js\nlet a = 1;",
};

describe("MarkdownStream", () => {
  for (const [name, text] of Object.entries(DOCUMENTS)) {
    it(`produces the output of a single rendering for any split: ${name}`, () => {
      for (let seed = 1; seed <= 3; seed++) {
        const box = document.createElement("div");
        const stream = new MarkdownStream(box, md);
        for (const prefix of cuts(text, seed)) stream.update(prefix, false);
        stream.update(text, true);
        expect(box.innerHTML, `seed ${seed}`).toBe(oneShot(text));
      }
    });
  }

  it("never changes a finished block", () => {
    const stream = new MarkdownStream(root, md);
    stream.update("First.\n\nSec", false);
    const first = root.querySelector("p");
    stream.update("First.\n\nSecond.\n\n- third", false);
    expect(root.querySelector("p")).toBe(first);
  });

  it("keeps the frame of growing code", () => {
    const stream = new MarkdownStream(root, md);
    stream.update("```js\nlet", false);
    const frame = root.querySelector("figure");
    stream.update("```js\nlet a = 1;\nlet b", false);
    expect(root.querySelector("figure")).toBe(frame);
    expect(root.querySelector("code")!.textContent).toBe("let a = 1;\nlet b");
  });

  it("keeps unchanged nodes of the open block", () => {
    const stream = new MarkdownStream(root, md);
    stream.update("- one\n- two\n- thr", false);
    const [list, first] = [root.querySelector("ul"), root.querySelector("li")];
    stream.update("- one\n- two\n- three\n- [four](https://example.com)", false);
    expect(root.querySelector("ul")).toBe(list);
    expect(root.querySelector("li")).toBe(first);
    expect(root.querySelectorAll("li").length).toBe(4);
  });

  it("only appends text to growing code", () => {
    const stream = new MarkdownStream(root, md);
    stream.update("```js\nlet", false);
    const text = root.querySelector("code")!.firstChild;
    stream.update("```js\nlet a = 1;\n\nlet b", false);
    expect(root.querySelector("code")!.firstChild).toBe(text);
    expect(text!.textContent).toBe("let a = 1;\n\nlet b");
  });

  it("makes wide tables scrollable by keyboard", () => {
    new MarkdownStream(root, md).update("|a|b|\n|-|-|\n|1|2|", true);
    const wrap = root.querySelector<HTMLElement>(".table-wrap")!;
    expect(wrap.tabIndex).toBe(0);
    expect(wrap.getAttribute("aria-label")).toBe("Table");
  });

  it("shows the address of an image instead of loading it", () => {
    const long = `https://pictures.example/${"a".repeat(80)}/end.png`;
    new MarkdownStream(root, md).update(
      `![a cat](${long}) and [![badge](https://x.example/b.svg)](https://y.example)`,
      true,
    );
    const chip = root.querySelector<HTMLAnchorElement>("a.image-chip")!;
    expect(chip.href).toBe(long);
    expect(chip.title).toBe(long);
    expect(chip.textContent).toContain("a cat");
    expect(chip.textContent).toContain("pictures.example/");
    expect(root.querySelector("a a")).toBeNull();
    expect(root.querySelector("span.image-chip")!.closest("a")!.href).toBe("https://y.example/");
  });

  it("renders from scratch when the text is replaced", () => {
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

  it("labels code blocks and adds a copy button", () => {
    new MarkdownStream(root, md).update("```python\nx = 1\n```", true);
    expect(root.querySelector(".code-bar span")!.textContent).toBe("python");
    expect(root.querySelector("button.code-copy")).not.toBeNull();
  });

  it.each([
    ["html", "<p>Hello</p>", 1],
    ["svg", "<svg/>", 1],
    ["xml", '<?xml version="1.0"?>\n<svg viewBox="0 0 1 1"/>', 1],
    ["xml", "<svgs/>", 0],
    ["js", "'<svg/>'", 0],
  ])("offers a preview of complete HTML and SVG blocks: %s %s", (language, code, count) => {
    const stream = new MarkdownStream(root, md);
    stream.update(`\`\`\`${language}\n${code}`, false);
    expect(root.querySelectorAll(".code-preview").length).toBe(0);
    stream.update(`\`\`\`${language}\n${code}\n\`\`\``, true);
    expect(root.querySelectorAll(".code-preview").length).toBe(count);
  });

  it("shows the preview in a frame without an origin, and the code again", () => {
    new MarkdownStream(root, md).update("```html\n<p>Hello</p>\n```", true);
    const button = root.querySelector<HTMLButtonElement>(".code-preview")!;
    button.click();
    const frame = root.querySelector("iframe")!;
    expect([frame.getAttribute("sandbox"), frame.hasAttribute("srcdoc")]).toEqual(["allow-scripts", false]);
    expect([root.querySelector("pre")!.hidden, button.textContent]).toEqual([true, "Code"]);
    button.click();
    expect([root.querySelector("iframe"), root.querySelector("pre")!.hidden]).toEqual([null, false]);
  });

  it("opens links in a new tab without a referrer", () => {
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
  const ACTIVE =
    "script, img, svg, iframe, form, input, style, base, meta, link, math, object, embed, video, audio, template";
  const check = () => {
    // KaTeX builds these nodes itself; they do not come from the text
    const drawn = (element: Element) => element.closest(".katex") !== null;
    expect([...root.querySelectorAll(ACTIVE)].filter((element) => !drawn(element))).toEqual([]);
    for (const element of root.querySelectorAll("*")) {
      for (const attribute of element.attributes) {
        expect(attribute.name).not.toMatch(drawn(element) ? /^on|^src|href/i : /^on|^style$|^src|^id$/i);
        if (attribute.name === "href") expect(attribute.value).toMatch(/^(https?:|mailto:)/i);
        if (attribute.name === "style") expect(attribute.value).not.toMatch(/url|expression|[<>]/i);
      }
    }
  };
  beforeEach(() => document.body.append(root));
  afterEach(() => root.remove());

  it("is covered by at least 60 cases", () => expect(new Set(XSS).size).toBeGreaterThanOrEqual(60));
  for (const text of XSS) {
    it(`is rendered inert: ${text.slice(0, 40)}`, () => {
      const stream = new MarkdownStream(root, md);
      for (const prefix of cuts(text, 3, 40)) {
        stream.update(prefix, false);
        check();
      }
      stream.update(text, true);
      check();
    });
  }

  // Parser and sanitizer each remove all active content without the other.
  it("is stopped by the parser alone and by the sanitizer alone", () => {
    const links = /(?:href|src)="(?!https?:|mailto:)/i;
    for (const text of XSS) {
      const html = md.render(text);
      expect(html).not.toMatch(links);
      expect(html).not.toMatch(
        /<(?:script|img|svg|iframe|form|style|base|meta|link|object|video|input|math|template)/i,
      );
      root.replaceChildren(sanitize(text));
      expect(root.querySelector(ACTIVE)).toBeNull();
      for (const element of root.querySelectorAll("*")) {
        for (const { name, value } of element.attributes) {
          expect(name).not.toMatch(/^on|^style$|^src|^id$/i);
          if (name === "href") expect(value).toMatch(/^(https?:|mailto:)/i);
        }
      }
    }
  });

  it("stays inert after colours and formulas are drawn", async () => {
    new MarkdownStream(root, md).update(XSS.join("\n\n"), true);
    await vi.waitFor(() => {
      expect(root.querySelector(".math")).toBeNull();
      expect(root.querySelector(".hljs-string")).not.toBeNull();
    }, 50_000);
    check();
    expect((window as { __xss?: unknown }).__xss).toBeUndefined();
  });
});

describe("openFence", () => {
  it("detects whether a fence is closed", () => {
    expect(openFence("```js\na\n")).toBe("a\n");
    expect(openFence("```js\na\n```")).toBeNull();
    expect(openFence("````\n```\n")).toBe("```\n");
    expect(openFence("text")).toBeNull();
  });
});

describe("closeOpenMarkup", () => {
  it.each([
    ["a **b", "a **b**"],
    ["a **b*", "a **b**"],
    ["a **", "a"],
    ["a `b", "a `b`"],
    ["see [docs](https://exa", "see docs"],
    ["see [docs", "see docs"],
    ["an ![image](https://exa", "an image"],
    ["an *italic", "an *italic*"],
    ["~~old", "~~old~~"],
    ["a *b* **", "a *b*"],
    ["snake_case", "snake_case"],
    ["2 * 3 < 4 and 20~25", "2 * 3 < 4 and 20~25"],
    ["$a_b$ and $$c", "$a_b$ and $$c"],
    ["a **b** c", "a **b** c"],
    ["```js\n**", "```js\n**"],
  ])("turns %j into %j", (before, after) => expect(closeOpenMarkup(before)).toBe(after));
});

describe("footnotes", () => {
  const text = "One[^a] and[^b] one[^a].\n\n[^a]: First *note*\n\n[^b]: Second [link](https://example.com)\n";

  it("links references and notes by buttons, which move the focus", () => {
    document.body.append(root);
    new MarkdownStream(root, md).update(text, true);
    const names = [...root.querySelectorAll("button")].map((button) => button.getAttribute("aria-label"));
    expect(names).toEqual(["Footnote 1", "Footnote 2", "Footnote 1", "Back to reference 1", "Back to reference 2"]);
    const notes = [...root.querySelectorAll<HTMLElement>("ol[aria-label=Footnotes] > li")];
    expect(notes.map((note) => note.textContent?.trim())).toEqual(["First note↩", "Second link↩"]);
    Element.prototype.scrollIntoView = vi.fn();
    const references = [...root.querySelectorAll<HTMLElement>(".footnote-ref")];
    references[2]!.click();
    expect(document.activeElement).toBe(notes[0]);
    notes[0]!.querySelector<HTMLElement>(".footnote-back")!.click();
    expect(document.activeElement).toBe(references[0]);
  });

  it("finds notes without a space before their text", () => {
    new MarkdownStream(root, md).update("One[^a].\n\n[^a]:First\n", true);
    expect(root.querySelector(".footnote")?.textContent?.trim()).toBe("First↩");
  });

  it("shows their source while the answer grows", () => {
    new MarkdownStream(root, md).update(text, false);
    expect(root.textContent).toContain("[^a]: First note");
  });
});
