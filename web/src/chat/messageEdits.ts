// Changes of stored messages: write another version of an answer, delete a message (with undo), branch into a new chat.
import type { ReadonlySignal } from "@preact/signals";
import * as rest from "../api/rest";
import { dismiss, toast } from "../app/notifications";
import type { Conversations } from "../conversations/conversations";
import type { ConversationLoader } from "./conversationLoader";
import type { Thread } from "./thread";
import type { Message, RemovedMessage } from "./tree";

const MAX_TITLE_CHARS = 200;

/** A deletion that can still be undone. */
interface PendingDeletion {
  readonly thread: Thread;
  readonly conversation: string;
  readonly item: string;
  readonly removed: RemovedMessage;
  readonly toast: number;
  readonly onUndone: () => void;
}

export class MessageEdits {
  private pending: PendingDeletion | null = null;
  private deleting: Promise<void> | null = null;

  constructor(
    private readonly thread: ReadonlySignal<Thread>,
    private readonly conversations: Conversations,
    private readonly loader: ConversationLoader,
  ) {
    addEventListener("pagehide", () => void this.flush());
  }

  /** Store another version of an answer, as its sibling, and show it. Without a change there is nothing to store. */
  async saveVersion(answer: Message, text: string): Promise<void> {
    if (text === answer.text.value.trim()) return;
    const thread = this.thread.value;
    const conversation = thread.id.value;
    const above = answer.parent === null ? "root" : thread.tree.value.get(answer.parent)?.id.value;
    if (conversation === null || !above || thread.live.value) return;
    try {
      await this.flush();
      const id = await rest.addAnswer(conversation, above, text);
      await this.loader.refresh(thread, conversation);
      const stored = thread.tree.value.byId(id);
      if (stored) thread.tree.value.reveal(stored);
    } catch (error) {
      toast(`Not saved. ${(error as Error).message}`);
    }
  }

  /** Hide a message now, and delete it on the server when that can no longer be undone. What followed it stays. */
  remove(message: Message, onUndone: () => void = () => {}): void {
    const thread = this.thread.value;
    const conversation = thread.id.value;
    const item = message.id.value;
    if (thread.live.value) return;
    void this.flush();
    const removed = thread.tree.value.remove(message);
    if (conversation === null || item === null) return; // never stored
    thread.hidden.add(item);
    const shown = toast("Message deleted. What followed it stays.", {
      label: "Undo",
      run: () => this.undo(),
      expired: () => void this.flush(),
    });
    this.pending = { thread, conversation, item, removed, toast: shown, onUndone };
  }

  /** Copy the branch that ends with `message` into a new conversation; returns its id, or null if that failed. */
  async branch(message: Message): Promise<string | null> {
    const conversation = this.thread.value.id.value;
    const leaf = message.id.value;
    if (conversation === null || leaf === null) return null;
    try {
      await this.flush();
      const title = `Branch of ${this.conversations.find(conversation)?.title || "Untitled"}`;
      const head = await rest.branchConversation(conversation, leaf, title.slice(0, MAX_TITLE_CHARS));
      this.conversations.upsert(head);
      return head.id;
    } catch (error) {
      toast(`Not copied. ${(error as Error).message}`);
      return null;
    }
  }

  /** Delete on the server what is hidden here. Null if nothing is. */
  flush(): Promise<void> | null {
    if (this.pending !== null) this.deleting = this.deleteNow(this.pending).finally(() => (this.deleting = null));
    return this.deleting;
  }

  private undo(): void {
    if (this.pending === null) return;
    const { thread, item, removed, onUndone } = this.pending;
    this.pending = null;
    thread.hidden.delete(item);
    thread.tree.value.restore(removed);
    onUndone();
  }

  private async deleteNow(deletion: PendingDeletion): Promise<void> {
    const { thread, conversation, item } = deletion;
    this.pending = null;
    dismiss(deletion.toast);
    try {
      await this.conversations.trackOwnChange(rest.deleteItem(conversation, item));
    } catch (error) {
      if (!(error instanceof rest.RequestError) || error.status !== 404) {
        thread.hidden.delete(item);
        toast(`Not deleted. ${(error as Error).message}`);
      }
    }
    await this.loader.refresh(thread, conversation); // the answers below have other tokens now
  }
}
