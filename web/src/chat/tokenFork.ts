// Forking inside an answer: its tokens, the alternatives at one token, and a new branch from there.

import { type ReadonlySignal, signal } from "@preact/signals";
import { type Alternative, getItem, getReasoning } from "../api/rest";
import { announce, NOT_LOADED, toast } from "../app/notifications";
import type { Thread } from "./thread";
import type { ClickedWord, TokenInspector } from "./tokenInspector";
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
    const module = await import("./tokenInspector").catch(() => null);
    if (!module) {
      toast(NOT_LOADED);
      return;
    }
    if (this.chat.thread.value.id.value !== conversation || !this.canOpen(message)) return;
    const current = this.inspector.value?.message === message ? this.inspector.value : null;
    const inspector = new module.TokenInspector(message, conversation, word?.offset === null ? null : word);
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
