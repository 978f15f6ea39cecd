// Finds the word under the pointer in a rendered answer, and its offset in the source text. Markdown keeps the order of
// words, so the third "fox" on screen is the third "fox" in the source if both have equally many. Otherwise (a link
// address, a formula) the offset is unknown.

const WORD = /[\p{L}\p{N}\p{M}_]+/gu;

export interface Word {
  readonly text: string;
  readonly range: Range;
}

/** Return the word at a point of the screen inside `root`, if any. */
export function wordAtPoint(root: HTMLElement, x: number, y: number): Word | null {
  const caret = caretAt(x, y);
  if (!caret || !root.contains(caret.node) || caret.node.nodeType !== Node.TEXT_NODE) return null;
  for (const match of (caret.node.textContent ?? "").matchAll(WORD)) {
    if (caret.offset < match.index || caret.offset > match.index + match[0].length) continue;
    const range = document.createRange();
    range.setStart(caret.node, match.index);
    range.setEnd(caret.node, match.index + match[0].length);
    const inside = [...range.getClientRects()].some(
      (box) => x >= box.left - 2 && x <= box.right + 2 && y >= box.top && y <= box.bottom,
    );
    return inside ? { text: match[0], range } : null; // the point is next to the word, e.g. after the end of a line
  }
  return null;
}

/** Offset of `word` of the rendered `root` in `source`, in UTF-16 units; null if unknown. */
export function wordOffset(source: string, root: Node, word: Word): number | null {
  const rendered = wordsOf(root);
  const equal = rendered.filter((each) => each.text === word.text);
  const position = equal.findIndex(
    (each) => each.node === word.range.startContainer && each.start === word.range.startOffset,
  );
  const matches = [...source.matchAll(WORD)].filter((match) => match[0] === word.text);
  if (position === -1 || matches.length !== equal.length) return null;
  return matches[position]!.index;
}

function wordsOf(root: Node): readonly { text: string; node: Node; start: number }[] {
  const words: { text: string; node: Node; start: number }[] = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    for (const match of (node.textContent ?? "").matchAll(WORD))
      words.push({ text: match[0], node, start: match.index });
  }
  return words;
}

function caretAt(x: number, y: number): { node: Node; offset: number } | null {
  if (typeof document.caretPositionFromPoint === "function") {
    const position = document.caretPositionFromPoint(x, y);
    return position ? { node: position.offsetNode, offset: position.offset } : null;
  }
  const range = document.caretRangeFromPoint(x, y); // Safari
  return range ? { node: range.startContainer, offset: range.startOffset } : null;
}
