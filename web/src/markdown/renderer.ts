// Incremental markdown rendering. Finished top-level blocks are rendered once and never changed; only the last, open
// block is rendered again, and only its changed nodes are replaced. The cost per delta does not grow with the answer.
// In its own chunk (see textStream.ts).

import type { Token } from "markdown-it";
import remend, { INCOMPLETE_IMAGE_PLACEHOLDER, type RemendOptions } from "remend";
import { decorateBlocks } from "./blocks";
import { addFootnotes } from "./footnotes";
import { makeParser, type Parser, sanitize } from "./parser";

const MAYBE_ITEM = /^ {0,3}(\d{1,9}[.)]?|[-+*])?\s*$/;
const REFERENCE = /^ {0,3}\[[^\]]+\]:/m; // a definition may change earlier blocks, or is a footnote

export class MarkdownStream {
  private text = "";
  private frozenChars = 0;
  private tail: ChildNode[] = [];
  private tailCode: Text | null = null;
  private openMath = false; // the tail began as a formula

  constructor(
    private readonly root: HTMLElement,
    private readonly md: Parser,
  ) {}

  /** Show `text`; `complete`: it will not grow. Another text than the previous one starts from scratch. */
  update(given: string, complete: boolean): void {
    const text = given.includes("\r") ? given.replace(/\r\n?/g, "\n") : given;
    if (!text.startsWith(this.text)) this.reset();
    this.text = text;
    if (complete && REFERENCE.test(text)) {
      this.reset();
      this.root.append(...this.render(text, true, withFootnotes));
      this.frozenChars = text.length;
      return;
    }
    let outline = outlineOf(this.md, text.slice(this.frozenChars));
    if (this.openMath && !outline.startsWithMath && this.frozenChars > 0) {
      this.reset(); // not a formula after all: its lines may belong to the block before
      outline = outlineOf(this.md, text);
    }
    const source = text.slice(this.frozenChars);
    const openFrom = complete ? source.length : outline.lastStart;
    this.openMath = outline.endsWithOpenMath;
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
    this.openMath = false;
  }

  private clearTail(): void {
    for (const node of this.tail) node.remove();
    this.tail = [];
    this.tailCode = null;
  }

  private renderTail(source: string): void {
    const open = openFence(source);
    if (open !== null && this.tailCode?.isConnected && open.startsWith(this.tailCode.data)) {
      this.tailCode.appendData(open.slice(this.tailCode.length)); // growing code: only text is appended
      return;
    }
    this.tail = patchNodes(this.root, this.tail, this.render(closeOpenMarkup(source), false));
    const code = open === null ? null : this.root.lastElementChild?.querySelector("code");
    const inside = code?.firstChild ?? code?.appendChild(document.createTextNode(""));
    this.tailCode = inside instanceof Text ? inside : null;
  }

  private render(source: string, complete: boolean, md = this.md): ChildNode[] {
    const fragment = sanitize(md.render(source));
    decorateBlocks(fragment, complete);
    return [...fragment.childNodes];
  }
}

interface Outline {
  readonly lastStart: number; // start of the last top-level block; everything before it is final
  readonly startsWithMath: boolean;
  readonly endsWithOpenMath: boolean;
}

function outlineOf(md: Parser, source: string): Outline {
  const blocks = topLevelTokens(md, source);
  const last = blocks.at(-1);
  return {
    lastStart: startOfLast(source, blocks),
    startsWithMath: blocks[0]?.type === "math_block",
    endsWithOpenMath: last?.type === "math_block" && last.meta?.open === true,
  };
}

/** Return the tokens that start top-level blocks. Inline content is not parsed. */
function topLevelTokens(md: Parser, source: string): Token[] {
  const tokens: Token[] = [];
  md.block.parse(source, md, {}, tokens);
  return tokens.filter((token) => token.level === 0 && token.nesting >= 0 && token.map);
}

function startOfLast(source: string, blocks: readonly Token[]): number {
  const start = (block: Token | undefined) => (block?.map ? lineStart(source, block.map[0]) : 0);
  const last = start(blocks.at(-1));
  // "2" after a list is a paragraph now, and the next item of the list one delta later
  return MAYBE_ITEM.test(source.slice(last)) ? start(blocks.at(-2)) : last;
}

function lineStart(source: string, line: number): number {
  let position = 0;
  for (; line > 0; line--) position = source.indexOf("\n", position) + 1;
  return position;
}

// math.ts closes formulas; the other options that are off change text that is complete.
const REMEND: RemendOptions = {
  linkMode: "text-only",
  katex: false,
  htmlTags: false,
  comparisonOperators: false,
  singleTilde: false,
};
const OPEN_IMAGE = new RegExp(`!\\[([^\\]]*)\\]\\(${INCOMPLETE_IMAGE_PLACEHOLDER}\\)`);
const OPENING_MARK = /(?<=^|\s)(?:\*{1,3}|_{1,3}|~~|`)$/; // nothing follows it yet

/** Close markup that an unfinished block has opened, so that `**word` does not show its stars. */
export function closeOpenMarkup(source: string): string {
  if (openFence(source) !== null) return source;
  return remend(source.replace(OPENING_MARK, ""), REMEND).replace(OPEN_IMAGE, "$1");
}

/** Return the content of `source` if it is one unclosed fenced block, else null. */
export function openFence(source: string): string | null {
  const match = /^(`{3,}|~{3,})[^\n`]*\n/.exec(source);
  if (!match) return null;
  const body = source.slice(match[0].length);
  const fence = match[1]!;
  const close = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`, "m");
  return close.test(body) ? null : body;
}

// -- Patching: replace nodes but keep unchanged ones, so that selection, scroll position and hover survive

/** Replace `old` by `next` (append to `root` if there is nothing to replace); returns the nodes in place. */
function patchNodes(root: Node, old: readonly ChildNode[], next: readonly ChildNode[]): ChildNode[] {
  const current = next.map((node, index) => {
    const before = old[index];
    if (!before || before.parentNode !== root) return root.appendChild(node);
    return updateNode(before, node);
  });
  for (const node of old.slice(next.length)) node.remove();
  return current;
}

function updateNode(before: ChildNode, after: ChildNode): ChildNode {
  if (before.isEqualNode(after)) return before;
  if (before instanceof Text && after instanceof Text) {
    if (after.data.startsWith(before.data)) before.appendData(after.data.slice(before.length));
    else before.data = after.data;
    return before;
  }
  if (before instanceof Element && after instanceof Element && sameKind(before, after)) {
    patchNodes(before, [...before.childNodes], [...after.childNodes]);
    return before;
  }
  before.replaceWith(after);
  return after;
}

/** Same tag and attributes. Formulas are replaced as a whole. */
function sameKind(before: Element, after: Element): boolean {
  if (before.tagName !== after.tagName || before.matches(".math, .math-drawn, .math-wrong")) return false;
  return before.cloneNode(false).isEqualNode(after.cloneNode(false));
}

const parser = makeParser();
const withFootnotes = addFootnotes(makeParser()); // their texts are anywhere in an answer: for complete ones

export function makeStream(root: HTMLElement): MarkdownStream {
  return new MarkdownStream(root, parser);
}
