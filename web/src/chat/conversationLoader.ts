// Loads conversations from the server, waits for answers after a lost connection, and stores the active leaf.
import type { StoredItem, WireConversation } from "../api/frames";
import * as rest from "../api/rest";
import { toast } from "../app/notifications";
import type { Conversations } from "../conversations/conversations";
import type { StoredConversation } from "../conversations/offlineCopies";
import { itemsOf, type Thread } from "./thread";
import type { Message } from "./tree";

const POLL_MS = 1000;
const MAX_POLLS = 20;
const MIN_POLLS = 2; // a restarted server reports running responses only after its first answers

export class ConversationLoader {
  private readonly refreshes = new Map<Thread, Promise<boolean>>();
  private readonly listed = new WeakMap<Thread, readonly StoredItem[]>();

  constructor(private readonly conversations: Conversations) {}

  /** Load a conversation; returns its head, or null if that failed. */
  async load(thread: Thread, id: string): Promise<WireConversation | null> {
    thread.state.value = "loading";
    thread.awaitingServer.value = true; // until it is known whether a response is running
    try {
      const head = this.show(thread, await this.fetchCopied(thread, id));
      void this.conversations.saveListCopy();
      return head;
    } catch (error) {
      // unreachable: show the copy of this browser, which the next connection updates
      const copy = error instanceof rest.RequestError ? null : await this.conversations.copies.conversation(id);
      if (copy) return this.show(thread, copy);
      thread.state.value = error instanceof rest.RequestError && error.status === 404 ? "missing" : "failed";
      return null;
    }
  }

  private show(thread: Thread, { head, items }: StoredConversation): WireConversation {
    thread.load(items, head);
    thread.state.value = "ready";
    this.conversations.upsert(head);
    return head;
  }

  /** Fetch a conversation and copy it for reading without the server. */
  private async fetchCopied(thread: Thread, id: string): Promise<StoredConversation> {
    const stored = await this.fetch(thread, id);
    void this.conversations.copies.saveConversation(id, stored);
    return stored;
  }

  /**
   * Fetch a conversation: of its messages only those that were not finished when they were last listed, if possible.
   * The head is read first: a change between the two requests is then detected as a newer revision.
   */
  private async fetch(thread: Thread, id: string): Promise<StoredConversation> {
    const known = this.listed.get(thread) ?? [];
    const running = known.findIndex((item) => item.status === "in_progress");
    const head = await rest.getConversation(id);
    const items = await rest.listItems(id, running < 0 ? known : known.slice(0, running));
    this.listed.set(thread, items);
    return { head, items };
  }

  /** Add what this page has shown to the copy of a conversation. */
  async updateCopy(thread: Thread): Promise<void> {
    const id = thread.id.value;
    const head = id === null ? undefined : this.conversations.find(id);
    if (id === null || !head) return;
    const copy = await this.conversations.copies.conversation(id);
    const active_leaf = thread.tree.value.leaf.value?.id.value ?? head.active_leaf;
    const items = itemsOf(thread, copy?.items ?? []);
    await this.conversations.saveListCopy();
    await this.conversations.copies.saveConversation(id, { head: { ...head, rev: 0, active_leaf }, items });
  }

  /** Update the head of a conversation. */
  async loadHead(id: string): Promise<void> {
    const head = await rest.getConversation(id).catch(() => null);
    if (head) this.conversations.upsert(head);
  }

  /**
   * Reload messages that other clients changed, without replacing the shown ones. False if that failed, and while the
   * ids of a message that was just sent are unknown: it would be shown twice. `LiveSync` reads again after the answer.
   */
  refresh(thread: Thread, id: string): Promise<boolean> {
    const reading =
      this.refreshes.get(thread) ??
      this.fetchCopied(thread, id)
        .then(({ head, items }) => {
          this.conversations.upsert(head);
          if (thread.awaitsIds) return false;
          thread.load(items, head);
          return true;
        })
        .catch(() => false)
        .finally(() => this.refreshes.delete(thread));
    this.refreshes.set(thread, reading);
    return reading;
  }

  /** Load the id of an answer of calls only, which has one when it is stored. Null if the answer needs none. */
  loadId(thread: Thread, answer: Message | undefined): Promise<boolean> | null {
    const id = thread.id.value;
    const isNeeded = answer?.id.value === null && answer.calls.value.length > 0;
    return isNeeded && id !== null ? this.refresh(thread, id) : null;
  }

  /** Wait until the answers of `response` are stored, then show them. False if none appeared. */
  async waitUntilStored(thread: Thread, id: string, response: string): Promise<boolean> {
    for (let poll = 0; poll < MAX_POLLS; poll++) {
      const stored = await this.fetch(thread, id).catch(() => null);
      const answers = stored?.items.filter((item) => item.response_id === response && item.role === "assistant") ?? [];
      if (stored && answers.length > 0 && answers.every((item) => item.status !== "in_progress")) {
        thread.load(stored.items, stored.head);
        return true;
      }
      const isRunning = this.conversations.runningIn(id).includes(response);
      if (stored && poll >= MIN_POLLS && !isRunning) {
        thread.load(stored.items, stored.head);
        thread.forgetUnlistedIds();
        return false;
      }
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
    return false;
  }

  /** Store which branch is shown, so that a reload shows it again. */
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
