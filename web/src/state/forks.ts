// Branching inside an answer: look at its tokens, see what else could have been said at one, go on from there.
import { signal } from "@preact/signals";
import type { Alternative } from "../wire/tokens";
import { getItem, getReasoning } from "../wire/tokens";
import { announce } from "./announcer";
import type { Chat } from "./chat";
import { TokenInspector, type ClickedWord } from "./inside";
import { toast } from "./toast";
import type { Message } from "./tree";

export class TokenForks {
  readonly inspector = signal<TokenInspector | null>(null); // one answer at a time

  constructor(private readonly chat: Chat) {}

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
