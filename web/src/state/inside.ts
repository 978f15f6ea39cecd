// The inside of one finished answer: its tokens, the place somebody looks at, and what else could have been said there.
import { signal } from "@preact/signals";
import { type Alternative, type Alternatives, getAlternatives, listTokens } from "../wire/tokens";
import type { Message } from "./tree";

const NUM_ALTERNATIVES = 8;

/** A token that shows something. `index` is its place among all tokens of the answer, which is where a fork cuts. */
export interface TokenSpan {
  readonly index: number;
  readonly text: string;
  readonly start: number; // in UTF-16 units, as strings here count
}

export interface Choice extends Alternative {
  readonly isOriginal: boolean;
  readonly rank: number | null; // null: beyond what the server ranks
}

/** A word of the answer as it is drawn: where it begins in the text (null: nobody can tell), and where on screen it is. */
export interface ClickedWord {
  readonly offset: number | null;
  readonly box: () => DOMRect | null;
}

export class TokenInspector {
  readonly spans = signal<readonly TokenSpan[] | null>(null);
  readonly selected = signal<number | null>(null); // the place looked at, counting spans
  readonly alternatives = signal<Alternatives | null>(null); // of that place
  readonly error = signal("");
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
      if (this.spans.value.length === 0) this.error.value = "No tokens are stored of this answer.";
    } catch (error) {
      this.error.value = (error as Error).message;
    }
  }

  /** Look at one place; null looks away. */
  async select(at: number | null): Promise<void> {
    const span = at === null ? undefined : this.spans.value?.[at];
    this.selected.value = span ? at : null;
    this.error.value = "";
    this.alternatives.value = (span && this.cache.get(span.index)) ?? null;
    const id = this.message.id.value;
    if (!span || this.alternatives.value || id === null) return;
    try {
      const found = await getAlternatives(this.conversation, id, span.index, NUM_ALTERNATIVES);
      this.cache.set(span.index, found);
      if (this.selected.value === at) this.alternatives.value = found;
    } catch (error) {
      if (this.selected.value === at) this.error.value = (error as Error).message;
    }
  }

  /** The span that holds the character at `offset` of the text. */
  spanAt(offset: number): number | null {
    const spans = this.spans.value ?? [];
    const at = spans.findIndex((span) => offset < span.start + span.text.length);
    return at === -1 ? null : at;
  }
}

/** The likeliest tokens of a place, with what was said among them, wherever it ranks. */
export function rankChoices(found: Alternatives): readonly Choice[] {
  const original = found.token.id;
  const choices = found.alternatives.map((each, index) => ({ ...each, rank: index + 1, isOriginal: each.id === original }));
  return choices.some((choice) => choice.isOriginal) ? choices : [...choices, { ...found.token, isOriginal: true }];
}

/** Map tokens to pieces of the text. Offsets on the wire count characters; a string here counts UTF-16 units. */
export function toTokenSpans(
  text: string,
  tokens: readonly { index: number; start: number | null; end: number | null }[],
): readonly TokenSpan[] {
  const units: number[] = []; // where each character begins
  let at = 0;
  for (const character of text) {
    units.push(at);
    at += character.length;
  }
  units.push(at);
  const spans: TokenSpan[] = [];
  for (const { index, start, end } of tokens) {
    if (start === null || end === null || end <= start) continue; // shows nothing, or the beginning of a character
    const from = units[start];
    const to = units[end];
    if (from !== undefined && to !== undefined) spans.push({ index, text: text.slice(from, to), start: from });
  }
  return spans;
}
