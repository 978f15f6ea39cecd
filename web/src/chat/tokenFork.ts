// Forking inside an answer: its tokens, the alternatives at one token, and a new branch from there.

import { type ReadonlySignal, signal } from "@preact/signals";
import {
  type Alternative,
  type Alternatives,
  getAlternatives,
  getItem,
  getReasoning,
  listTokens,
  scoreTokens,
  type TokenScore,
} from "../api/rest";
import { announce, toast } from "../app/notifications";
import type { Thread } from "./thread";
import type { Message } from "./tree";
import type { ForkStart, Turn } from "./turn";

/** The part of the chat that `TokenForks` reads and calls. */
interface ForkTarget {
  readonly thread: ReadonlySignal<Thread>;
  readonly live: ReadonlySignal<Turn | null>;
  forkAtToken(answer: Message, start: ForkStart): void;
  answerFrom(user: Message, text: string): void;
}

export class TokenForks {
  readonly inspector = signal<TokenInspector | null>(null); // one answer at a time

  constructor(private readonly chat: ForkTarget) {}

  /** Whether the tokens of the answer can be shown now: they are stored, unless it was imported or edited. */
  canOpen(message: Message): boolean {
    return message.tokens.value !== 0 && this.canContinue(message);
  }

  /** Whether the answer can be continued now. */
  canContinue(message: Message): boolean {
    const ended = ["done", "stopped", "steered", "interrupted", "length"].includes(message.status.value);
    return ended && message.id.value !== null && message.text.value !== "" && !this.chat.live.value;
  }

  /** Inspect the tokens of `message`, or the token at one word of its rendered text. */
  async open(message: Message, word: ClickedWord | null = null): Promise<void> {
    const conversation = this.chat.thread.value.id.value;
    if (conversation === null || !this.canOpen(message)) return;
    const current = this.inspector.value?.message === message ? this.inspector.value : null;
    const inspector = new TokenInspector(message, conversation, word?.offset === null ? null : word);
    if (current) {
      inspector.spans.value = current.spans.value;
      inspector.scores.value = current.scores.value;
    }
    this.inspector.value = inspector;
    if (!inspector.spans.value) await inspector.load();
    if (this.inspector.value !== inspector) return;
    if (inspector.error.value) {
      toast(inspector.error.value);
      this.close();
    } else if (inspector.word?.offset != null) await inspector.select(inspector.spanAt(inspector.word.offset));
    else {
      announce(`${inspector.spans.value?.length ?? 0} tokens. Arrow keys move, Enter shows the alternatives.`);
      await inspector.loadScores();
    }
  }

  close(): void {
    this.inspector.value = null;
  }

  /** Fork the answer at the selected token with another token. */
  branch(alternative: Alternative): void {
    const response = this.inspector.value?.alternatives.value;
    if (response) this.branchAt(response.index, alternative, response.usage.copied_pages);
  }

  /** Fork the inspected answer after its first `keepTokens` tokens. `inspectedPages`: copied for the alternatives. */
  branchAt(keepTokens: number, { id, text }: Alternative, inspectedPages = 0): void {
    const inspector = this.inspector.value;
    const item = inspector?.message.id.value;
    if (!inspector || !item || this.chat.live.value) return;
    this.close();
    this.chat.forkAtToken(inspector.message, { item, keepTokens, token: { id, text }, inspectedPages });
  }

  /** Continue an answer that was cut, after its last token. */
  async continueAnswer(message: Message): Promise<void> {
    const item = message.id.value;
    const conversation = this.chat.thread.value.id.value;
    if (item === null || conversation === null) return;
    try {
      const keepTokens = message.tokens.value ?? (await getItem(conversation, item)).num_tokens;
      // an answer that was written by hand, imported, or moved by a deletion: its tokens are not stored
      const question = this.chat.thread.value.questionOf(message);
      if (!keepTokens && question) this.chat.answerFrom(question, message.text.value);
      else if (!keepTokens) toast("The tokens of this answer are not stored, so it cannot be continued.");
      else this.chat.forkAtToken(message, { item, keepTokens, token: null, inspectedPages: 0 });
    } catch (error) {
      toast((error as Error).message);
    }
  }

  /** Load the reasoning of an answer that was loaded without it. */
  async loadReasoning(message: Message): Promise<void> {
    const item = message.id.value;
    const conversation = this.chat.thread.value.id.value;
    if (item === null || conversation === null || message.reasoning.value) return;
    try {
      message.reasoning.value =
        (await getReasoning(conversation, item, message.calls.value.length)) ?? "No reasoning is stored.";
    } catch (error) {
      toast((error as Error).message);
    }
  }
}

// -- Tokens of one finished answer, the selected token, and its alternatives

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
interface ClickedWord {
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
