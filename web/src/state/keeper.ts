// What the server keeps of a conversation: loading it, waiting for it after a break, and telling it what we chose.
import type { StoredItem, WireConversation } from "../wire/frames";
import * as rest from "../wire/rest";
import type { Conversations } from "./conversations";
import type { Thread } from "./thread";
import { toast } from "./toast";

const CATCH_UP_MS = 1000;
const CATCH_UPS = 20;

interface Stored {
  readonly head: WireConversation;
  readonly items: readonly StoredItem[];
}

export class Keeper {
  private readonly reading = new Map<Thread, Promise<boolean>>();

  constructor(private readonly conversations: Conversations) {}

  /** Load a conversation; returns its head, or null if it did not load. */
  async load(thread: Thread, id: string): Promise<WireConversation | null> {
    thread.state.value = "loading";
    thread.settling.value = true; // until it is known whether something is being written
    try {
      const { head, items } = await fetchStored(id);
      thread.load(items, head);
      thread.state.value = "ready";
      this.conversations.upsert(head);
      return head;
    } catch (error) {
      thread.state.value = error instanceof rest.RequestFailed && error.status === 404 ? "missing" : "failed";
      return null;
    }
  }

  /** Learn how a conversation stands. */
  async head(id: string): Promise<void> {
    const head = await rest.getConversation(id).catch(() => null);
    if (head) this.conversations.upsert(head);
  }

  /** Read again what others have changed, under what is shown. False if that did not work. */
  refresh(thread: Thread, id: string): Promise<boolean> {
    const reading =
      this.reading.get(thread) ??
      fetchStored(id)
        .then(({ head, items }) => {
          thread.load(items, head);
          this.conversations.upsert(head);
          return true;
        })
        .catch(() => false)
        .finally(() => this.reading.delete(thread));
    this.reading.set(thread, reading);
    return reading;
  }

  /** Wait until the answers of `response` are stored, and show them. False if none turned up. */
  async catchUp(thread: Thread, id: string, response: string): Promise<boolean> {
    for (let look = 0; look < CATCH_UPS; look++) {
      const stored = await fetchStored(id).catch(() => null);
      const answers = stored?.items.filter((item) => item.response_id === response && item.role === "assistant") ?? [];
      if (stored && answers.length > 0 && answers.every((item) => item.status !== "in_progress")) {
        thread.load(stored.items, stored.head);
        return true;
      }
      await new Promise((resolve) => setTimeout(resolve, CATCH_UP_MS));
    }
    return false;
  }

  /** Tell the server which branch is shown, so that a reload shows it again. */
  async keepLeaf(thread: Thread): Promise<void> {
    const leaf = thread.tree.value.leaf.value?.id.value;
    const id = thread.id.value;
    if (!leaf || id === null || thread.live.value) return;
    try {
      await this.conversations.mine(rest.updateConversation(id, { active_leaf: leaf }));
    } catch (error) {
      toast((error as Error).message);
    }
  }
}

/** The head first: what changes between the two is then news, never overlooked. */
async function fetchStored(id: string): Promise<Stored> {
  const head = await rest.getConversation(id);
  return { head, items: await rest.listItems(id) };
}
