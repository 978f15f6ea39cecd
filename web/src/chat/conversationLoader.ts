// What the server keeps of a conversation: loading it, waiting for it after a break, and telling it what we chose.
import type { StoredItem, WireConversation } from "../api/frames";
import * as rest from "../api/rest";
import { toast } from "../app/notifications";
import type { Conversations } from "../conversations/conversations";
import type { Thread } from "./thread";

const POLL_MS = 1000;
const MAX_POLLS = 20;

interface StoredConversation {
  readonly head: WireConversation;
  readonly items: readonly StoredItem[];
}

export class ConversationLoader {
  private readonly refreshes = new Map<Thread, Promise<boolean>>();

  constructor(private readonly conversations: Conversations) {}

  /** Load a conversation; returns its head, or null if it did not load. */
  async load(thread: Thread, id: string): Promise<WireConversation | null> {
    thread.state.value = "loading";
    thread.awaitingServer.value = true; // until it is known whether something is being written
    try {
      const { head, items } = await fetchStored(id);
      thread.load(items, head);
      thread.state.value = "ready";
      this.conversations.upsert(head);
      return head;
    } catch (error) {
      thread.state.value = error instanceof rest.RequestError && error.status === 404 ? "missing" : "failed";
      return null;
    }
  }

  /** Learn how a conversation stands. */
  async loadHead(id: string): Promise<void> {
    const head = await rest.getConversation(id).catch(() => null);
    if (head) this.conversations.upsert(head);
  }

  /** Read again what others have changed, under what is shown. False if that did not work. */
  refresh(thread: Thread, id: string): Promise<boolean> {
    const reading =
      this.refreshes.get(thread) ??
      fetchStored(id)
        .then(({ head, items }) => {
          thread.load(items, head);
          this.conversations.upsert(head);
          return true;
        })
        .catch(() => false)
        .finally(() => this.refreshes.delete(thread));
    this.refreshes.set(thread, reading);
    return reading;
  }

  /** Wait until the answers of `response` are stored, and show them. False if none turned up. */
  async waitUntilStored(thread: Thread, id: string, response: string): Promise<boolean> {
    for (let look = 0; look < MAX_POLLS; look++) {
      const stored = await fetchStored(id).catch(() => null);
      const answers = stored?.items.filter((item) => item.response_id === response && item.role === "assistant") ?? [];
      if (stored && answers.length > 0 && answers.every((item) => item.status !== "in_progress")) {
        thread.load(stored.items, stored.head);
        return true;
      }
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
    return false;
  }

  /** Tell the server which branch is shown, so that a reload shows it again. */
  async saveActiveLeaf(thread: Thread): Promise<void> {
    const leaf = thread.tree.value.leaf.value?.id.value;
    const id = thread.id.value;
    if (!leaf || id === null || thread.live.value) return;
    try {
      await this.conversations.trackOwnChange(rest.updateConversation(id, { active_leaf: leaf }));
    } catch (error) {
      toast((error as Error).message);
    }
  }
}

/** The head first: what changes between the two is then news, never overlooked. */
async function fetchStored(id: string): Promise<StoredConversation> {
  const head = await rest.getConversation(id);
  return { head, items: await rest.listItems(id) };
}
