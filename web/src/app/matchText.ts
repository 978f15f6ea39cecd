// Match of a typed query with a short text, such as the name of a command or the title of a conversation.

export const NO_MATCH = 0;
export const LETTERS = 1; // a word's letters occur in this order, from the beginning of a word of the text
export const PART = 2; // the text contains every word
export const WORD_START = 3; // a word of the text begins with every word

/** Lower case without accents. */
const fold = (text: string) =>
  text
    .normalize("NFD")
    .replace(/\p{Mn}/gu, "")
    .toLowerCase();

const isWordStart = (text: string, at: number) => at === 0 || !/[\p{L}\p{N}]/u.test(text[at - 1]!);

function matchWord(word: string, text: string): number {
  let found = NO_MATCH;
  for (let at = text.indexOf(word); at >= 0; at = text.indexOf(word, at + 1)) {
    if (isWordStart(text, at)) return WORD_START;
    found = PART;
  }
  if (found !== NO_MATCH) return found;
  for (let at = 0; at < text.length; at++) {
    if (isWordStart(text, at) && text[at] === word[0] && hasLetters(word, text.slice(at))) return LETTERS;
  }
  return NO_MATCH;
}

function hasLetters(word: string, text: string): boolean {
  let at = 0;
  for (const letter of word) {
    at = text.indexOf(letter, at) + 1;
    if (at === 0) return false;
  }
  return true;
}

/** How well a text matches a query, by its word that matches worst; an empty query matches every text. */
export function matchText(query: string, text: string): number {
  const words = fold(query)
    .split(/\s+/)
    .filter((word) => word !== "");
  const folded = fold(text);
  return Math.min(WORD_START, ...words.map((word) => matchWord(word, folded)));
}

/** Return the items that match, best first and otherwise in their order. */
export function filterMatches<Item>(
  query: string,
  items: readonly Item[],
  textOf: (item: Item) => string,
): readonly { readonly item: Item; readonly match: number }[] {
  return items
    .map((item) => ({ item, match: matchText(query, textOf(item)) }))
    .filter(({ match }) => match > NO_MATCH)
    .sort((a, b) => b.match - a.match);
}
