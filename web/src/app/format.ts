// Text and numbers for display.

export const CELL_PX = 7.2; // width of one character of the mono font at 12 px

const WIDE =
  /\p{Extended_Pictographic}|[\u1100-\u115f\u2e80-\u303e\u3041-\u33ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60]/u;

/** Put a text on one line: line breaks and tabs become one visible character each. */
export function singleLine(text: string): string {
  return text.replace(/[\r\n]/g, "⏎").replace(/\t/g, "⇥");
}

/** Count monospace cells: wide characters take two. */
export function countCells(text: string): number {
  let count = 0;
  for (const character of text) count += WIDE.test(character) ? 2 : 1;
  return count;
}

/** Cut a text to at most `most` characters. */
export function truncate(text: string, most: number): string {
  const characters = [...text];
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : text;
}

/** Return the longest common beginning of the texts, cut after a whole word. */
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

export function formatPercent(share: number): string {
  if (share >= 0.0995) return `${Math.round(share * 100)} %`;
  return share >= 0.00095 ? `${(share * 100).toFixed(1)} %` : "< 0.1 %";
}

/** Replace leading, trailing and control white space by visible characters. */
export function showWhitespace(text: string): string {
  if (text === "") return "(nothing)";
  return text
    .replaceAll("\n", "↵")
    .replaceAll("\t", "⇥")
    .replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
}

export function plural(count: number, noun: string, several = `${noun}s`): string {
  return `${count} ${count === 1 ? noun : several}`;
}

export function formatBytes(bytes: number): string {
  if (bytes < 1024) return plural(bytes, "byte");
  const kib = bytes / 1024;
  return kib < 1024 ? `${formatShort(kib)} KiB` : `${formatShort(kib / 1024)} MiB`;
}

function formatShort(value: number): string {
  return value < 10 ? value.toFixed(1).replace(/\.0$/, "") : String(Math.round(value));
}

export function formatMs(ms: number): string {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

/** A share as a whole percent; a dash if there is nothing to share. */
export function formatShare(part: number, whole: number): string {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–";
}

/** The two largest units of a duration, from minutes up. */
export function formatDuration(seconds: number): string {
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  if (hours >= 24) return `${plural(Math.floor(hours / 24), "day")} ${hours % 24} h`;
  return hours > 0 ? `${hours} h ${minutes % 60} min` : `${minutes} min`;
}
