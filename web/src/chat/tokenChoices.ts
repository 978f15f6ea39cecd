// What the view of an answer's tokens shows of their probabilities: ranked alternatives, and doubts.

import type { Alternative, Alternatives } from "../api/rest";
import { DOUBT } from "./tokenInspector";

export interface Choice extends Alternative {
  readonly isOriginal: boolean;
  readonly rank: number | null; // null: beyond the ranks that the server returns
}

/** Return the most likely tokens, with the original token added if it is not among them. */
export function rankChoices(response: Alternatives): readonly Choice[] {
  const original = response.token.id;
  const choices = response.alternatives.map((each, index) => ({
    ...each,
    rank: index + 1,
    isOriginal: each.id === original,
  }));
  return choices.some((choice) => choice.isOriginal) ? choices : [...choices, { ...response.token, isOriginal: true }];
}

/** Level of doubt at a token, 0 (sure) to 4. */
export function doubtLevel(probability: number): number {
  return [0.9, DOUBT, 0.25, 0.1].filter((limit) => probability < limit).length;
}

/** The doubt after `from` (or before it), around the ends; null if there is none. */
export function nextDoubt(doubts: readonly number[], from: number, step: 1 | -1): number | null {
  const next = step === 1 ? doubts.find((at) => at > from) : doubts.findLast((at) => at < from);
  return next ?? doubts.at(step === 1 ? 0 : -1) ?? null;
}
