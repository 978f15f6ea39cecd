// Branching inside an answer: look at its tokens, see what else could have been said at one, go on from there.
import { signal } from "@preact/signals";
import type { Alternative } from "../wire/tokens";
import { getItem, getThought } from "../wire/tokens";
import { announce } from "./announcer";
import type { Chat } from "./chat";
import { Inside, type Spot } from "./inside";
import { toast } from "./toast";
import type { Message } from "./tree";

export class Forks {
  readonly inside = signal<Inside | null>(null); // one answer at a time

  constructor(private readonly chat: Chat) {}

  /** Whether an answer can be branched inside now. */
  canOpen(message: Message): boolean {
    const ended = ["done", "stopped", "length"].includes(message.status.value);
    return ended && message.id.value !== null && message.text.value !== "" && !this.chat.live.value;
  }

  /** Look inside `message`: at its tokens, or at one word of it as it is drawn. */
  async open(message: Message, spot: Spot | null = null): Promise<void> {
    const conversation = this.chat.thread.value.id.value;
    if (conversation === null || !this.canOpen(message)) return;
    const known = this.inside.value?.message === message ? this.inside.value : null;
    const inside = new Inside(message, conversation, spot?.offset === null ? null : spot);
    if (known) inside.spans.value = known.spans.value;
    this.inside.value = inside;
    if (!inside.spans.value) await inside.load();
    if (this.inside.value !== inside) return;
    if (inside.problem.value) {
      toast(inside.problem.value);
      this.close();
    } else if (inside.spot?.offset != null) await inside.look(inside.spanAt(inside.spot.offset));
    else announce(`${inside.spans.value?.length ?? 0} tokens. Arrow keys move, Enter shows the alternatives.`);
  }

  close(): void {
    this.inside.value = null;
  }

  /** Go on with another token in the place that is looked at. */
  branch(alternative: Alternative): void {
    const inside = this.inside.value;
    const found = inside?.found.value;
    const item = inside?.message.id.value;
    if (!inside || !found || !item || this.chat.live.value) return;
    this.close();
    const token = { id: alternative.id, text: alternative.text };
    const lookedPages = found.usage.copied_pages;
    this.chat.goOnInside(inside.message, { item, keep: found.index, token, lookedPages });
  }

  /** Go on with an answer that was cut, from its last token. */
  async goOn(message: Message): Promise<void> {
    const item = message.id.value;
    const conversation = this.chat.thread.value.id.value;
    if (item === null || conversation === null) return;
    try {
      const keep = message.tokens.value ?? (await getItem(conversation, item)).num_tokens;
      if (keep === null) toast("This answer's tokens are not stored, so it cannot go on.");
      else this.chat.goOnInside(message, { item, keep, token: null, lookedPages: 0 });
    } catch (error) {
      toast((error as Error).message);
    }
  }

  /** Fetch what was thought before an answer that was loaded without it. */
  async recallThought(message: Message): Promise<void> {
    const item = message.id.value;
    const conversation = this.chat.thread.value.id.value;
    if (item === null || conversation === null || message.thought.value) return;
    try {
      message.thought.value = (await getThought(conversation, item)) ?? "Nothing is stored.";
    } catch (error) {
      toast((error as Error).message);
    }
  }
}
