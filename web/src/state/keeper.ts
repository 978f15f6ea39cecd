// What the server keeps of a conversation: loading it, waiting for it after a break, and telling it what we chose.
import type { StoredItem, WireConversation } from "../wire/frames";
import * as rest from "../wire/rest";
import type { Conversations } from "./conversations";
import type { Thread } from "./thread";
import { toast } from "./toast";

const CATCH_UP_MS = 1000;
const CATCH_UPS = 20;
const LOOK_AGAIN_MS = [300, 700, 1500, 3000];
const SYSTEM_CHARS = 512; // the longest value that conversation metadata takes

interface Stored {
  readonly conversation: WireConversation;
  readonly items: readonly StoredItem[];
}

export class Keeper {
  constructor(private readonly conversations: Conversations) {}

  /** Load a conversation; returns its system prompt, or null if it did not load. */
  async load(thread: Thread, id: string): Promise<string | null> {
    thread.state.value = "loading";
    try {
      const { conversation, items } = await fetchStored(id);
      thread.load(items, conversation.active_leaf);
      thread.state.value = "ready";
      this.conversations.upsert(conversation);
      if (thread.tree.value.leaf.value?.role === "user") void this.lookAgain(thread, id);
      return conversation.metadata?.["system"] ?? "";
    } catch (error) {
      thread.state.value = error instanceof rest.RequestFailed && error.status === 404 ? "missing" : "failed";
      return null;
    }
  }

  /** Wait until the answers of `response` are stored, and show them. False if none turned up. */
  async catchUp(thread: Thread, id: string, response: string): Promise<boolean> {
    for (let look = 0; look < CATCH_UPS; look++) {
      const stored = await fetchStored(id).catch(() => null);
      const answers = stored?.items.filter((item) => item.response_id === response && item.role === "assistant") ?? [];
      if (stored && answers.length > 0 && answers.every((item) => item.status !== "in_progress")) {
        thread.load(stored.items, stored.conversation.active_leaf);
        return true;
      }
      await pause(CATCH_UP_MS);
    }
    return false;
  }

  /** Tell the server which branch is shown, so that a reload shows it again. */
  keepLeaf(thread: Thread): void {
    const leaf = thread.tree.value.leaf.value?.id.value;
    const id = thread.id.value;
    if (!leaf || id === null || thread.live.value) return;
    rest.updateConversation(id, { active_leaf: leaf }).catch((error: Error) => toast(error.message));
  }

  /** A conversation remembers its system prompt. */
  async keepSystemPrompt(thread: Thread, text: string): Promise<void> {
    const id = thread.id.peek();
    if (id === null || text.length > SYSTEM_CHARS || thread.state.peek() !== "ready") return;
    if ((this.conversations.find(id)?.metadata?.["system"] ?? "") === text) return;
    try {
      this.conversations.upsert(await rest.updateConversation(id, { metadata: text ? { system: text } : {} }));
    } catch {
      // the next turn sends it anyway; only the memory of it is lost
    }
  }

  /** A question without an answer: right after a reload, the server may still be storing what it had. */
  private async lookAgain(thread: Thread, id: string): Promise<void> {
    thread.settling.value = true;
    for (const wait of LOOK_AGAIN_MS) {
      await pause(wait);
      if (thread.live.value || thread.tree.value.leaf.value?.role !== "user") break;
      const stored = await fetchStored(id).catch(() => null);
      const news = stored !== null && stored.items.length > thread.tree.value.size;
      if (news) thread.load(stored.items, stored.conversation.active_leaf);
    }
    thread.settling.value = false;
  }
}

async function fetchStored(id: string): Promise<Stored> {
  const [conversation, items] = await Promise.all([rest.getConversation(id), rest.listItems(id)]);
  return { conversation, items };
}

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}
