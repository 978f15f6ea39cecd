// The inside of one finished answer: its tokens, the place somebody looks at, and what else could have been said there.
import { signal } from "@preact/signals";
import { type Alternative, type Alternatives, alternativesAt, listTokens } from "../wire/tokens";
import type { Message } from "./tree";

const SHOWN = 8;

/** A token that shows something. `index` is its place among all tokens of the answer, which is where a fork cuts. */
export interface Span {
  readonly index: number;
  readonly text: string;
  readonly start: number; // in UTF-16 units, as strings here count
}

export interface Choice extends Alternative {
  readonly said: boolean;
  readonly rank: number | null; // null: beyond what the server ranks
}

/** A word of the answer as it is drawn: where it begins in the text (null: nobody can tell), and where on screen it is. */
export interface Spot {
  readonly offset: number | null;
  readonly box: () => DOMRect | null;
}

export class Inside {
  readonly spans = signal<readonly Span[] | null>(null);
  readonly at = signal<number | null>(null); // the place looked at, counting spans
  readonly found = signal<Alternatives | null>(null); // of that place
  readonly problem = signal("");
  private readonly known = new Map<number, Alternatives>();

  constructor(
    readonly message: Message,
    readonly conversation: string,
    readonly spot: Spot | null, // null: the answer is shown as tokens
  ) {}

  async load(): Promise<void> {
    const id = this.message.id.value;
    if (id === null) return;
    try {
      this.spans.value = spansOf(this.message.text.value, await listTokens(this.conversation, id));
      if (this.spans.value.length === 0) this.problem.value = "No tokens are stored of this answer.";
    } catch (error) {
      this.problem.value = (error as Error).message;
    }
  }

  /** Look at one place; null looks away. */
  async look(at: number | null): Promise<void> {
    const span = at === null ? undefined : this.spans.value?.[at];
    this.at.value = span ? at : null;
    this.problem.value = "";
    this.found.value = (span && this.known.get(span.index)) ?? null;
    const id = this.message.id.value;
    if (!span || this.found.value || id === null) return;
    try {
      const found = await alternativesAt(this.conversation, id, span.index, SHOWN);
      this.known.set(span.index, found);
      if (this.at.value === at) this.found.value = found;
    } catch (error) {
      if (this.at.value === at) this.problem.value = (error as Error).message;
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
export function choicesOf(found: Alternatives): readonly Choice[] {
  const said = found.token.id;
  const choices = found.alternatives.map((each, index) => ({ ...each, rank: index + 1, said: each.id === said }));
  return choices.some((choice) => choice.said) ? choices : [...choices, { ...found.token, said: true }];
}

/** Map tokens to pieces of the text. Offsets on the wire count characters; a string here counts UTF-16 units. */
export function spansOf(
  text: string,
  tokens: readonly { index: number; start: number | null; end: number | null }[],
): readonly Span[] {
  const units: number[] = []; // where each character begins
  let at = 0;
  for (const character of text) {
    units.push(at);
    at += character.length;
  }
  units.push(at);
  const spans: Span[] = [];
  for (const { index, start, end } of tokens) {
    if (start === null || end === null || end <= start) continue; // shows nothing, or the beginning of a character
    const from = units[start];
    const to = units[end];
    if (from !== undefined && to !== undefined) spans.push({ index, text: text.slice(from, to), start: from });
  }
  return spans;
}
