// Branching inside an answer: look at its tokens, see what else could have been said at one, go on from there.

import { type ReadonlySignal, signal } from "@preact/signals";
import { type Alternative, type Alternatives, getAlternatives, getItem, getReasoning, listTokens } from "../api/rest";
import { announce, toast } from "../app/notifications";
import type { Thread } from "./thread";
import type { Message } from "./tree";
import type { ForkStart, Turn } from "./turn";

/** The part of the chat that `TokenForks` reads and calls. */
interface ForkTarget {
  readonly thread: ReadonlySignal<Thread>;
  readonly live: ReadonlySignal<Turn | null>;
  forkAtToken(answer: Message, start: ForkStart): void;
}

export class TokenForks {
  readonly inspector = signal<TokenInspector | null>(null); // one answer at a time

  constructor(private readonly chat: ForkTarget) {}

  /** Whether an answer can be branched inside now. */
  canOpen(message: Message): boolean {
    const ended = ["done", "stopped", "length"].includes(message.status.value);
    return ended && message.id.value !== null && message.text.value !== "" && !this.chat.live.value;
  }

  /** Look inside `message`: at its tokens, or at one word of it as it is drawn. */
  async open(message: Message, spot: ClickedWord | null = null): Promise<void> {
    const conversation = this.chat.thread.value.id.value;
    if (conversation === null || !this.canOpen(message)) return;
    const known = this.inspector.value?.message === message ? this.inspector.value : null;
    const inside = new TokenInspector(message, conversation, spot?.offset === null ? null : spot);
    if (known) inside.spans.value = known.spans.value;
    this.inspector.value = inside;
    if (!inside.spans.value) await inside.load();
    if (this.inspector.value !== inside) return;
    if (inside.error.value) {
      toast(inside.error.value);
      this.close();
    } else if (inside.word?.offset != null) await inside.select(inside.spanAt(inside.word.offset));
    else announce(`${inside.spans.value?.length ?? 0} tokens. Arrow keys move, Enter shows the alternatives.`);
  }

  close(): void {
    this.inspector.value = null;
  }

  /** Go on with another token in the place that is looked at. */
  branch(alternative: Alternative): void {
    const inside = this.inspector.value;
    const found = inside?.alternatives.value;
    const item = inside?.message.id.value;
    if (!inside || !found || !item || this.chat.live.value) return;
    this.close();
    const token = { id: alternative.id, text: alternative.text };
    const inspectedPages = found.usage.copied_pages;
    this.chat.forkAtToken(inside.message, { item, keepTokens: found.index, token, inspectedPages });
  }

  /** Go on with an answer that was cut, from its last token. */
  async continueAnswer(message: Message): Promise<void> {
    const item = message.id.value;
    const conversation = this.chat.thread.value.id.value;
    if (item === null || conversation === null) return;
    try {
      const keepTokens = message.tokens.value ?? (await getItem(conversation, item)).num_tokens;
      if (keepTokens === null) toast("This answer's tokens are not stored, so it cannot go on.");
      else this.chat.forkAtToken(message, { item, keepTokens, token: null, inspectedPages: 0 });
    } catch (error) {
      toast((error as Error).message);
    }
  }

  /** Fetch what was thought before an answer that was loaded without it. */
  async loadReasoning(message: Message): Promise<void> {
    const item = message.id.value;
    const conversation = this.chat.thread.value.id.value;
    if (item === null || conversation === null || message.reasoning.value) return;
    try {
      message.reasoning.value = (await getReasoning(conversation, item)) ?? "Nothing is stored.";
    } catch (error) {
      toast((error as Error).message);
    }
  }
}

// ---- The inside of one finished answer: its tokens, the place somebody looks at, and what else could have been said there.

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
  const choices = found.alternatives.map((each, index) => ({
    ...each,
    rank: index + 1,
    isOriginal: each.id === original,
  }));
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
