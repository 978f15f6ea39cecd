// Markdown that grows. Top-level blocks that are finished are rendered once and never touched again; only the last,
// still open block is rendered anew. So a long answer costs the same per delta as a short one.
import { frameCode } from "./code";
import type { Parser } from "./parser";
import { sanitize } from "./sanitize";

const MAYBE_ITEM = /^ {0,3}(\d{1,9}[.)]?|[-+*])?\s*$/;
const REFERENCE = /^ {0,3}\[[^\]]+\]:\s/m; // a definition may change how an earlier block reads

export class MarkdownStream {
  private text = "";
  private frozenChars = 0;
  private tail: ChildNode[] = [];
  private tailCode: HTMLElement | null = null;

  constructor(
    private readonly root: HTMLElement,
    private readonly md: Parser,
  ) {}

  /** Show `text`. `complete` says that no more will come. A text that does not extend the last one starts afresh. */
  update(text: string, complete: boolean): void {
    if (!text.startsWith(this.text)) this.reset();
    this.text = text;
    if (complete && REFERENCE.test(text)) this.reset();
    const source = text.slice(this.frozenChars);
    const openFrom = complete ? source.length : lastBlockStart(this.md, source);
    if (openFrom > 0) {
      this.clearTail();
      this.root.append(...this.render(source.slice(0, openFrom), true));
      this.frozenChars += openFrom;
    }
    if (!complete) this.renderTail(source.slice(openFrom));
  }

  private reset(): void {
    this.root.replaceChildren();
    this.tail = [];
    this.tailCode = null;
    this.frozenChars = 0;
  }

  private clearTail(): void {
    for (const node of this.tail) node.remove();
    this.tail = [];
    this.tailCode = null;
  }

  private renderTail(source: string): void {
    const open = this.tailCode ? openFence(source) : null;
    if (open !== null && this.tailCode) {
      this.tailCode.textContent = open; // a growing program: only its text changes, its frame stays
      return;
    }
    this.clearTail();
    this.tail = this.render(mend(source), false);
    this.root.append(...this.tail);
    const last = this.tail.at(-1);
    if (openFence(source) !== null && last instanceof HTMLElement) this.tailCode = last.querySelector("code");
  }

  private render(source: string, complete: boolean): ChildNode[] {
    const fragment = sanitize(this.md.render(source));
    for (const pre of fragment.querySelectorAll("pre")) frameCode(pre, complete);
    for (const item of fragment.querySelectorAll("li")) markTask(item);
    return [...fragment.childNodes];
  }
}

/** Where the last top-level block of `source` begins: everything before it is final. */
export function lastBlockStart(md: Parser, source: string): number {
  const starts: number[] = [];
  for (const token of md.parse(source, {})) {
    if (token.level === 0 && token.nesting >= 0 && token.map) starts.push(lineStart(source, token.map[0]));
  }
  const last = starts.at(-1) ?? 0;
  // "2" after a list is a paragraph now and the list's next item one delta later
  return MAYBE_ITEM.test(source.slice(last)) ? (starts.at(-2) ?? 0) : last;
}

function lineStart(source: string, line: number): number {
  let position = 0;
  for (; line > 0; line--) position = source.indexOf("\n", position) + 1;
  return position;
}

/** Close what an unfinished block has opened, so that half a `**word` does not show its stars. */
export function mend(source: string): string {
  if (openFence(source) !== null) return source;
  let text = source.replace(/!?\[([^\]\n]*)\]\([^)\s]*$/, "$1");
  for (const mark of ["`", "**"]) {
    if ((text.split(mark).length - 1) % 2 === 0) continue;
    text = text.endsWith(mark) ? text.slice(0, -mark.length) : text.replace(/\*?\s*$/, "") + mark;
  }
  return text;
}

/** The content of `source` where it is one fenced block that has not closed yet, else null. */
export function openFence(source: string): string | null {
  const match = /^(`{3,}|~{3,})[^\n`]*\n/.exec(source);
  if (!match) return null;
  const body = source.slice(match[0].length);
  const fence = match[1]!;
  const close = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`, "m");
  return close.test(body) ? null : body;
}

/** `[ ]` and `[x]` at the head of a list item, as a mark rather than brackets. */
function markTask(item: HTMLElement): void {
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
