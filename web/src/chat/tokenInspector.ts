// The tokens of one finished answer, the selected token, and its alternatives. Loaded when they are first shown.

import { signal } from "@preact/signals";
import { type Alternatives, getAlternatives, listTokens, scoreTokens, type TokenScore } from "../api/rest";
import { toast } from "../app/notifications";
import type { Message } from "./tree";

const NUM_ALTERNATIVES = 8;
const NUM_INLINE = 4; // alternatives of each token of an answer
export const DOUBT = 0.5; // a token with a smaller probability is a doubt

/** A token that shows text. `index` is its position among all tokens, where a fork cuts. */
export interface TokenSpan {
  readonly index: number;
  readonly text: string;
  readonly start: number; // in UTF-16 units
}

/** A clicked word: its offset in the text (null: unknown) and its position on screen. */
export interface ClickedWord {
  readonly offset: number | null;
  readonly box: () => DOMRect | null;
}

export class TokenInspector {
  readonly spans = signal<readonly TokenSpan[] | null>(null);
  readonly selected = signal<number | null>(null); // index into `spans`
  readonly alternatives = signal<Alternatives | null>(null); // at the selected token
  readonly error = signal("");
  readonly scores = signal<ReadonlyMap<number, TokenScore> | null>(null); // by token index; null: not loaded
  readonly focused = signal(0); // index into `spans` of the token with the focus
  private readonly cache = new Map<number, Alternatives>();

  constructor(
    readonly message: Message,
    readonly conversation: string,
    readonly word: ClickedWord | null, // null: the answer is shown as tokens
  ) {}

  async load(): Promise<void> {
    const id = this.message.id.value;
    if (id === null) return;
    try {
      this.spans.value = toTokenSpans(this.message.text.value, await listTokens(this.conversation, id));
      if (this.spans.value.length === 0) this.error.value = "The tokens of this answer are not stored.";
    } catch (error) {
      this.error.value = (error as Error).message;
    }
  }

  /** Load the probability of every token. The tokens stay usable without. */
  async loadScores(): Promise<void> {
    const id = this.message.id.value;
    if (id === null || this.scores.value || this.error.value) return;
    try {
      const scores = await scoreTokens(this.conversation, id, NUM_INLINE);
      this.scores.value = new Map(scores.map((score) => [score.index, score]));
    } catch (error) {
      toast(`The probabilities did not load. ${(error as Error).message}`);
    }
  }

  scoreAt(at: number): TokenScore | undefined {
    const span = this.spans.value?.[at];
    return span && this.scores.value?.get(span.index);
  }

  /** Places of the tokens that the model held for unlikely, in order. */
  get doubts(): readonly number[] {
    return (this.spans.value ?? []).flatMap((_, at) =>
      (this.scoreAt(at)?.token.probability ?? 1) < DOUBT ? [at] : [],
    );
  }

  /** Select a token and load its alternatives; null clears the selection. */
  async select(at: number | null): Promise<void> {
    const span = at === null ? undefined : this.spans.value?.[at];
    this.selected.value = span ? at : null;
    this.error.value = "";
    this.alternatives.value = (span && this.cache.get(span.index)) ?? null;
    const id = this.message.id.value;
    if (!span || this.alternatives.value || id === null) return;
    try {
      const response = await getAlternatives(this.conversation, id, span.index, NUM_ALTERNATIVES);
      this.cache.set(span.index, response);
      if (this.selected.value === at) this.alternatives.value = response;
    } catch (error) {
      if (this.selected.value === at) this.error.value = (error as Error).message;
    }
  }

  /** Index of the span that contains the character at `offset`. */
  spanAt(offset: number): number | null {
    const spans = this.spans.value ?? [];
    const at = spans.findIndex((span) => offset < span.start + span.text.length);
    return at === -1 ? null : at;
  }
}

/** Map tokens to text spans. Offsets of the API count characters; JavaScript strings count UTF-16 units. */
export function toTokenSpans(
  text: string,
  tokens: readonly { index: number; start: number | null; end: number | null }[],
): readonly TokenSpan[] {
  const units: number[] = []; // start of each character
  let at = 0;
  for (const character of text) {
    units.push(at);
    at += character.length;
  }
  units.push(at);
  const spans: TokenSpan[] = [];
  for (const { index, start, end } of tokens) {
    if (start === null || end === null || end <= start) continue; // shows no text, or only part of a character
    const from = units[start];
    const to = units[end];
    if (from !== undefined && to !== undefined) spans.push({ index, text: text.slice(from, to), start: from });
  }
  return spans;
}
