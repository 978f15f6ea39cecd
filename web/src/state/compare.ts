// What several texts have in common.

/** The longest beginning that all share, ending with a whole word. */
export function commonPrefix(texts: readonly string[]): string {
  const [first = "", ...others] = texts;
  let length = first.length;
  for (const text of others) {
    let same = 0;
    while (same < length && same < text.length && text[same] === first[same]) same++;
    length = same;
  }
  const whole = texts.every((text) => text.length === length || /\s/.test(text[length]!));
  const start = first.slice(0, length);
  return whole ? start : start.replace(/\S+$/, "");
}
