// The list at the left: newest first, renamed and deleted in place. A deletion waits a moment for an "undo".
import { computed, signal } from "@preact/signals";
import type { WireConversation } from "../wire/frames";
import * as rest from "../wire/rest";
import { toast } from "./toast";

const UNDO_MS = 6000;

export class Conversations {
  readonly filter = signal("");
  readonly state = signal<"loading" | "ready" | "failed" | "locked">("loading");
  readonly more = signal(false);
  private readonly all = signal<readonly WireConversation[]>([]);
  private readonly leaving = signal<ReadonlySet<string>>(new Set());
  private lastId: string | null = null;

  readonly shown = computed(() => {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    return this.all.value.filter((conversation) => {
      if (this.leaving.value.has(conversation.id)) return false;
      const title = (conversation.title ?? "").toLowerCase();
      return words.every((word) => title.includes(word));
    });
  });

  constructor() {
    addEventListener("pagehide", () => this.leaving.value.forEach((id) => void rest.deleteConversation(id)));
  }

  find(id: string): WireConversation | undefined {
    return this.all.value.find((conversation) => conversation.id === id);
  }

  async refresh(): Promise<void> {
    try {
      const page = await rest.listConversations();
      this.all.value = page.data;
      this.lastId = page.last_id;
      this.more.value = page.has_more;
      this.state.value = "ready";
    } catch (error) {
      this.state.value = error instanceof rest.RequestFailed && error.status === 401 ? "locked" : "failed";
    }
  }

  async loadMore(): Promise<void> {
    if (this.lastId === null) return;
    const page = await rest.listConversations(this.lastId);
    const known = new Set(this.all.value.map((conversation) => conversation.id));
    this.all.value = [...this.all.value, ...page.data.filter((conversation) => !known.has(conversation.id))];
    this.lastId = page.last_id;
    this.more.value = page.has_more;
  }

  upsert(conversation: WireConversation): void {
    const others = this.all.value.filter((other) => other.id !== conversation.id);
    this.all.value = [conversation, ...others].sort((a, b) => b.updated_at - a.updated_at);
  }

  async rename(id: string, title: string): Promise<void> {
    const before = this.find(id);
    if (!before || title === "" || title === before.title) return;
    this.replace({ ...before, title });
    try {
      this.replace(await rest.updateConversation(id, { title }));
    } catch (error) {
      this.replace(before);
      toast(`Not renamed. ${(error as Error).message}`);
    }
  }

  /** Hide the conversation now, delete it on the server when the time for an undo is over. */
  remove(id: string): void {
    const title = this.find(id)?.title ?? "Conversation";
    this.leaving.value = new Set([...this.leaving.value, id]);
    const timer = setTimeout(() => void this.reallyRemove(id), UNDO_MS);
    toast(`“${title}” deleted.`, {
      label: "Undo",
      run: () => {
        clearTimeout(timer);
        this.stay(id);
      },
    });
  }

  private async reallyRemove(id: string): Promise<void> {
    try {
      await rest.deleteConversation(id);
      this.all.value = this.all.value.filter((conversation) => conversation.id !== id);
    } catch (error) {
      toast(`Not deleted. ${(error as Error).message}`);
    }
    this.stay(id);
  }

  private stay(id: string): void {
    this.leaving.value = new Set([...this.leaving.value].filter((other) => other !== id));
  }

  private replace(conversation: WireConversation): void {
    this.all.value = this.all.value.map((other) => (other.id === conversation.id ? conversation : other));
  }
}
