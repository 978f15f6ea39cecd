// Syntax colours, fetched the first time a complete code block needs them.
import type { HLJSApi } from "highlight.js";
import { sanitize } from "./sanitize";

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
    highlighterLoading = null; // the chunk did not arrive; the plain text stays, the next block asks again
  }
}
