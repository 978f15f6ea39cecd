// Detection of formulas: `$..$` and `\(..\)` inline, `$$..$$` and `\[..\]` as blocks. Amounts of money are not
// formulas.
import type MarkdownIt from "markdown-it";
import type { StateBlock, StateInline } from "markdown-it";

const CLOSES: Readonly<Record<string, string>> = { $$: "$$", $: "$", "\\(": "\\)", "\\[": "\\]" };
const OPENS = Object.keys(CLOSES); // `$$` before `$`
const NOTATION = /[\\^_={}<>+]/;
const PROSE = /\s\S*[A-Za-z]{2}|[A-Za-z]{2}\S*\s/; // several words

export function addMath(md: InstanceType<typeof MarkdownIt>): void {
  md.inline.ruler.before("escape", "math", inlineMath);
  md.block.ruler.before("fence", "math_block", blockMath, { alt: ["paragraph", "reference", "blockquote", "list"] });
  md.renderer.rules.math = (tokens, index) => {
    const { content, markup } = tokens[index]!;
    const display = markup === "$$" || markup === "\\[";
    return `<span class="math ${display ? "math-display" : "math-inline"}">${md.utils.escapeHtml(content)}</span>`;
  };
  md.renderer.rules.math_block = (tokens, index) => {
    const { content, meta } = tokens[index]!;
    const state = meta?.open ? "math-open" : "math math-display";
    return `<div class="${state}">${md.utils.escapeHtml(content)}</div>`;
  };
}

function inlineMath(state: StateInline, silent: boolean): boolean {
  const { src, pos } = state;
  const open = OPENS.find((mark) => src.startsWith(mark, pos));
  if (open === undefined) return false;
  const from = pos + open.length;
  const to = open === "$" ? closingDollar(src, pos) : src.indexOf(CLOSES[open]!, from);
  if (to < 0 || to > state.posMax) return false;
  const content = src.slice(from, to);
  if (content.trim() === "" || (open !== "$$" && !looksLikeMath(content))) return false;
  if (!silent) {
    const token = state.push("math", "span", 0);
    token.content = content.trim();
    token.markup = open;
  }
  state.pos = to + CLOSES[open]!.length;
  return true;
}

/** Find the `$` that closes the one at `pos`: not next to a space, not before a digit or letter. -1: none. */
function closingDollar(src: string, pos: number): number {
  if (/[\w$]/.test(src[pos - 1] ?? "") || /[\s$]/.test(src[pos + 1] ?? " ")) return -1;
  for (let at = pos + 1; at < src.length; at++) {
    if (src[at] === "\\") at++;
    else if (src[at] === "`")
      return -1; // code has precedence
    else if (src[at] === "$") return /\s/.test(src[at - 1]!) || /[\w$]/.test(src[at + 1] ?? "") ? -1 : at;
  }
  return -1;
}

/** `$x, y$` is a formula; `$5 (or 4$)` and `$7), 5$` are money, `\[citation needed\]` is text. */
function looksLikeMath(content: string): boolean {
  if (NOTATION.test(content)) return true;
  const amount = /^\d/.test(content) && content.split("(").length !== content.split(")").length;
  return !amount && !PROSE.test(content);
}

function blockMath(state: StateBlock, startLine: number, endLine: number, silent: boolean): boolean {
  if (state.sCount[startLine]! - state.blkIndent >= 4) return false;
  const first = lineText(state, startLine);
  const open = first.startsWith("$$") ? "$$" : first.startsWith("\\[") ? "\\[" : null;
  if (open === null) return false;
  const end = closingLine(state, startLine, endLine, CLOSES[open]!);
  // A formula contains no empty line. An open one extends to the end of the text if its mark is alone on its line.
  if (end === null && (first.trim() !== open || !reachesEnd(state, startLine, endLine))) return false;
  const last = end ?? endLine - 1;
  const whole = state.getLines(startLine, last + 1, state.sCount[startLine]!, false).trim();
  const content = end === null ? whole : whole.slice(2, -2).trim();
  if (end !== null && (content === "" || (open === "\\[" && !looksLikeMath(content)))) return false;
  if (silent) return true;
  const token = state.push("math_block", "div", 0);
  token.content = content;
  token.markup = open;
  token.meta = { open: end === null };
  token.map = [startLine, last + 1];
  token.block = true;
  state.line = last + 1;
  return true;
}

/** Find the line that ends with the closing mark; null if there is none before an empty line, or if text follows it. */
function closingLine(state: StateBlock, startLine: number, endLine: number, close: string): number | null {
  for (let line = startLine; line < endLine && isContinuation(state, startLine, line); line++) {
    const text = lineText(state, line);
    const at = text.indexOf(close, line === startLine ? 2 : 0);
    if (at >= 0) return text.slice(at + close.length).trim() === "" ? line : null;
  }
  return null;
}

function reachesEnd(state: StateBlock, startLine: number, endLine: number): boolean {
  for (let line = startLine; line < endLine; line++) if (!isContinuation(state, startLine, line)) return false;
  return true;
}

function isContinuation(state: StateBlock, startLine: number, line: number): boolean {
  return line === startLine || (!state.isEmpty(line) && state.sCount[line]! >= state.blkIndent);
}

function lineText(state: StateBlock, line: number): string {
  return state.src.slice(state.bMarks[line]! + state.tShift[line]!, state.eMarks[line]!);
}
