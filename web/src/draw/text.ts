// How much room a text takes where every character is one cell wide.
export const CELL_PX = 7.2; // px, one character of the mono font at 12 px

const WIDE =
  /\p{Extended_Pictographic}|[\u1100-\u115f\u2e80-\u303e\u3041-\u33ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60]/u;

/** A text on one line: breaks and tabs become signs of one character each. */
export function singleLine(text: string): string {
  return text.replace(/[\r\n]/g, "⏎").replace(/\t/g, "⇥");
}

/** How many cells a text takes: wide characters take two. */
export function countCells(text: string): number {
  let count = 0;
  for (const character of text) count += WIDE.test(character) ? 2 : 1;
  return count;
}

/** The beginning of a text in so many characters. */
export function truncate(text: string, most: number): string {
  const characters = [...text];
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : text;
}
