// @vitest-environment jsdom
import { beforeEach, describe, expect, it, vi } from "vitest";
import { makeParser } from "../src/markdown/parser";
import { MarkdownStream } from "../src/markdown/renderer";

const md = makeParser();
let root: HTMLElement;
beforeEach(() => {
  root = document.createElement("div");
});
const show = (text: string) => new MarkdownStream(root, md).update(text, true);
const formulas = () => [...root.querySelectorAll(".math, .math-drawn, .math-wrong")];
const source = (place: Element) => place.querySelector("annotation")?.textContent ?? place.textContent;

describe("detected as a formula", () => {
  it.each<[string, readonly string[]]>([
    ["so $x^2$ is", ["x^2"]],
    ["$a$, $b$ and $c$.", ["a", "b", "c"]],
    ["$n$-th and ($f(x)$)", ["n", "f(x)"]],
    ["\\(a+b\\) inline", ["a+b"]],
    ["$$\n\\int_0^1 x\\,dx\n$$", ["\\int_0^1 x\\,dx"]],
    ["\\[\na\n= b\n- c\n\\]", ["a\n= b\n- c"]],
    ["We have\n$$x = 1$$\nthen", ["x = 1"]],
    ["- item\n\n  $$\n  y\n  $$", ["y"]],
    ["> \\[ z_1 \\]", ["z_1"]],
    ["| $a$ | $b$ |\n|--|--|\n| $c$ | 5 |", ["a", "b", "c"]],
    ["$\\$5$ is TeX", ["\\$5"]],
    ["$100$ in a formula", ["100"]],
  ])("%j", (text, expected) => {
    show(text);
    expect(formulas().map(source)).toEqual(expected);
  });
});

describe("not detected as a formula", () => {
  it.each([
    "It costs $5.",
    "From $5 to $10, or $20/month vs. $30.",
    "$5-$10 and US$7 and A$8",
    "I have $5 and 10$ left",
    "paid $5 (or 4.50$) for it",
    "$HOME/$USER and $PATH:$PATH",
    "`$x$` and $ x $ and $$",
    "($5)–($7), 5$ each, 6$",
    "\\[citation needed\\] and \\(not so\\)",
    "Set $A and use `x$`.",
    "\\$x^2\\$",
    "$$ is a lot of dollars",
    "```\n$x$\n$$\ny\n$$\n```",
    "$$\n\nx\n\n$$",
  ])("%j", (text) => {
    show(text);
    expect(formulas().map(source)).toEqual([]);
  });

  it("keeps the text around a price unchanged", () => {
    show("It costs $5 (or 4.50$) a *month*.");
    expect(root.textContent!.trim()).toBe("It costs $5 (or 4.50$) a month.");
  });
});

describe("drawing of formulas", () => {
  const settled = () => vi.waitFor(() => expect(root.querySelector(".math")).toBeNull(), { timeout: 50_000 });

  it("draws with KaTeX, visible and for screen readers", async () => {
    document.body.append(root);
    show("$\\frac{1}{2}$ and\n\n$$\n\\sum_i i\n$$");
    await settled();
    expect(root.querySelectorAll(".katex-html").length).toBe(2);
    expect(root.querySelectorAll("math").length).toBe(2);
    expect(root.querySelector(".math-display")!.getAttribute("tabindex")).toBe("0");
    root.remove();
  });

  it("leaves invalid TeX as text", async () => {
    show("$\\frac{1}$ and $\\nosuchmacro$");
    await settled();
    expect([...root.querySelectorAll(".math-wrong")].map((place) => place.textContent)).toEqual([
      "\\frac{1}",
      "\\nosuchmacro",
    ]);
  });

  it("keeps a drawn formula while its paragraph grows", async () => {
    const stream = new MarkdownStream(root, md);
    stream.update("$a^2$ and", false);
    await settled();
    stream.update("$a^2$ and more", false);
    const drawn = root.querySelector(".katex");
    stream.update("$a^2$ and more of it", false);
    expect(root.querySelector(".katex")).toBe(drawn);
  });

  it("prevents TeX from linking, loading, styling and unbounded expansion", async () => {
    const tex = [
      "\\href{javascript:window.__xss=1}{x}",
      "\\url{javascript:alert(1)}",
      "\\includegraphics{https://evil.example/a.png}",
      "\\htmlStyle{color:red}{x}",
      "\\htmlClass{code}{x}",
      "\\htmlId{app}{x}",
      "\\htmlData{a=b}{x}",
      "\\def\\a{\\a\\a}\\a",
      "\\text{<img src=x onerror=window.__xss=1>}",
      "\\rule{9999em}{9999em}",
    ];
    show(tex.map((one) => `$${one}$`).join("\n\n"));
    await settled();
    expect(root.querySelector("a, img, script, .code, #app, [data-a], [onerror]")).toBeNull();
    expect(root.innerHTML).not.toContain("9999em;");
  });
});
