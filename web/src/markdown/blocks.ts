// Decoration of rendered blocks: code frames with colours, scrollable tables, formulas, task marks.

import type { HLJSApi } from "highlight.js";
import { copyText } from "../app/browser";
import { linkFootnotes } from "./footnotes";
import { sanitize } from "./parser";
import { isPreviewable, previewButtons } from "./preview";

/** Decorate the nodes of `fragment` before they are shown. `complete`: the text will not grow. */
export function decorateBlocks(fragment: DocumentFragment, complete: boolean): void {
  for (const pre of fragment.querySelectorAll("pre")) frameCode(pre, complete);
  for (const item of fragment.querySelectorAll("li")) decorateTask(item);
  for (const wrap of fragment.querySelectorAll<HTMLElement>(".table-wrap")) makeScrollable(wrap, "Table");
  drawFormulas(fragment);
  linkFootnotes(fragment);
}

/** Make wide content scrollable by keyboard. */
function makeScrollable(box: HTMLElement, label: string): void {
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", label);
}

/** Show `[ ]` and `[x]` at the start of a list item as a check mark. */
function decorateTask(item: HTMLElement): void {
  const first = item.firstChild?.nodeType === Node.TEXT_NODE ? item.firstChild : item.firstChild?.firstChild;
  const match = first?.nodeType === Node.TEXT_NODE ? /^\[([ xX])\]\s/.exec(first.textContent ?? "") : null;
  if (!first || !match) return;
  first.textContent = (first.textContent ?? "").slice(match[0].length);
  const mark = document.createElement("span");
  mark.className = match[1] === " " ? "task" : "task task-done";
  mark.textContent = match[1] === " " ? "☐ " : "☑ ";
  item.prepend(mark);
  item.classList.add("task-item");
}

// -- Code blocks

const COPIED_MS = 1600;

/** Wrap `pre` in a labelled frame. Colours only when `complete`: partial code has no stable syntax. */
function frameCode(pre: HTMLPreElement, complete: boolean): HTMLElement {
  const code = pre.querySelector("code");
  const language = code?.dataset.language ?? "";
  const frame = document.createElement("figure");
  frame.className = "code";
  const bar = document.createElement("figcaption");
  bar.className = "code-bar";
  const label = document.createElement("span");
  label.textContent = language || "text";
  bar.append(label);
  if (complete && isPreviewable(language, pre.textContent ?? "")) bar.append(previewButtons(pre, language));
  bar.append(copyButton(pre));
  pre.tabIndex = 0; // wide code scrolls by keyboard
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? `${language} code` : "code");
  pre.replaceWith(frame);
  frame.append(bar, pre);
  if (complete && code && language) void highlight(code, language);
  return frame;
}

function copyButton(pre: HTMLPreElement): HTMLButtonElement {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "code-copy";
  button.textContent = "Copy";
  button.addEventListener("click", () => {
    void copyText(pre.textContent ?? "").then((done) => {
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
    });
  });
  return button;
}

// -- Syntax colours, loaded with the first complete code block

const MAX_CODE_CHARS = 60_000;
let highlighterLoading: Promise<HLJSApi> | null = null;

export async function highlight(code: HTMLElement, language: string): Promise<void> {
  const text = code.textContent ?? "";
  if (text.length > MAX_CODE_CHARS) return;
  highlighterLoading ??= import("./languages").then((module) => module.makeHighlighter());
  try {
    const hljs = await highlighterLoading;
    if (!hljs.getLanguage(language)) return;
    code.replaceChildren(sanitize(hljs.highlight(text, { language, ignoreIllegals: true }).value));
  } catch {
    highlighterLoading = null; // the chunk did not load: the code stays plain, the next block tries again
  }
}

// -- Formulas, drawn when complete. KaTeX is loaded with the first one; until then the TeX source is shown

const MAX_TEX_CHARS = 5000;
const MAX_CACHED = 300;

type DrawFormula = (tex: string, display: boolean) => HTMLElement | null;

let drawTex: DrawFormula | null = null;
let katexLoading: Promise<void> | null = null;
const cache = new Map<string, HTMLElement | null>(); // the open block is rendered again and again, its formulas are not

/** Draw every formula below `root`, now or when KaTeX is loaded. */
function drawFormulas(root: DocumentFragment): void {
  const formulas = root.querySelectorAll<HTMLElement>(".math");
  if (formulas.length === 0) return;
  if (drawTex) {
    formulas.forEach(showFormula);
    return;
  }
  katexLoading ??= import("./katex").then(
    (module) => {
      drawTex = module.drawFormula;
    },
    () => {
      katexLoading = null; // the chunk did not load: the TeX stays as text, the next formula tries again
    },
  );
  void katexLoading.then(() => drawTex && formulas.forEach(showFormula));
}

function showFormula(element: HTMLElement): void {
  const tex = element.textContent ?? "";
  if (!element.classList.contains("math") || tex.length > MAX_TEX_CHARS) return;
  const display = element.classList.contains("math-display");
  const key = `${display} ${tex}`;
  if (!cache.has(key)) {
    if (cache.size >= MAX_CACHED) cache.clear();
    cache.set(key, drawTex!(tex, display));
  }
  const drawn = cache.get(key);
  element.classList.remove("math");
  if (!drawn) {
    element.classList.add("math-wrong");
    return;
  }
  element.classList.add("math-drawn");
  element.replaceChildren(...drawn.cloneNode(true).childNodes);
  if (!display) return;
  element.tabIndex = 0; // wide formulas scroll by keyboard
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", "Formula");
}
