// Comparison of answers: common beginning, words that differ, and how likely each answer is to the model.

import { commonPrefix } from "../app/format";

/** A part of a text. `differs`: the text that it is compared with does not have it. */
export interface TextPart {
  readonly text: string;
  readonly differs: boolean;
}

export interface Comparison {
  readonly common: string; // beginning of all texts
  readonly rests: readonly (readonly TextPart[])[];
}

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
const MAX_CELLS = 4_000_000; // of the table of a comparison: two texts of 2,000 words and spaces

/** Compare each text with the first one, and the first one with the second. */
export function compareTexts(texts: readonly string[]): Comparison {
  const common = texts.length > 1 ? commonPrefix(texts) : "";
  const rests = texts.map((text) => text.slice(common.length).match(WORDS) ?? []);
  return { common, rests: rests.map((words, index) => markDifferences(words, rests[index === 0 ? 1 : 0] ?? words)) };
}

/** Mark the words that are not in a longest common subsequence with `other`. */
function markDifferences(words: readonly string[], other: readonly string[]): readonly TextPart[] {
  const common = words.length * other.length > MAX_CELLS ? new Set<number>() : commonWords(words, other);
  const parts: { text: string; differs: boolean }[] = [];
  for (const [at, text] of words.entries()) {
    const differs = !common.has(at);
    const last = parts.at(-1);
    // a space between two marked words is marked with them
    const joins =
      last &&
      (last.differs === differs ||
        (text.trim() === "" && last.differs && at + 1 < words.length && !common.has(at + 1)));
    if (joins) last.text += text;
    else parts.push({ text, differs: differs && text.trim() !== "" });
  }
  return parts;
}

/** Places of the words that belong to a longest common subsequence. */
function commonWords(words: readonly string[], other: readonly string[]): ReadonlySet<number> {
  const width = other.length + 1;
  const lengths = new Uint16Array((words.length + 1) * width); // of the rests that start at each pair of words
  for (let i = words.length - 1; i >= 0; i--)
    for (let j = other.length - 1; j >= 0; j--)
      lengths[i * width + j] =
        words[i] === other[j]
          ? lengths[(i + 1) * width + j + 1]! + 1
          : Math.max(lengths[(i + 1) * width + j]!, lengths[i * width + j + 1]!);
  const found = new Set<number>();
  for (let i = 0, j = 0; i < words.length && j < other.length; ) {
    if (words[i] === other[j]) {
      found.add(i);
      i++;
      j++;
    } else if (lengths[(i + 1) * width + j]! >= lengths[i * width + j + 1]!) i++;
    else j++;
  }
  return found;
}

/** Geometric mean of the probabilities of an answer's tokens. */
export function meanProbability(logprobs: readonly number[]): number {
  return Math.exp(logprobs.reduce((sum, logprob) => sum + logprob, 0) / Math.max(1, logprobs.length));
}
