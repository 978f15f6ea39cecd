// The conversation list: entries, running responses, unseen answers, pending deletions (with undo).

import { computed, signal } from "@preact/signals";
import type { RunningResponse, WireConversation } from "../api/frames";
import * as rest from "../api/rest";
import { load, save } from "../app/browser";
import { toast } from "../app/notifications";
import { isPinned, type Metadata, sameMetadata, withPin } from "./metadata";
import { OfflineCopies } from "./offlineCopies";

const MAX_ATTEMPTS = 4;
const MAX_LIST_COPY = 50; // entries

export class Conversations {
  readonly state = signal<"loading" | "ready" | "failed" | "locked">("loading");
  readonly lockCode = signal(""); // error code of the response that locked the page
  readonly hasMore = signal(false);
  private readonly all = signal<ReadonlyMap<string, WireConversation>>(new Map());
  private readonly pendingDeletes = signal<ReadonlySet<string>>(new Set());
  private readonly running = signal<ReadonlyMap<string, readonly string[]>>(new Map()); // response ids by conversation
  private readonly unseen = signal<ReadonlySet<string>>(new Set()); // answered while another conversation was shown
  private readonly now = signal(Date.now());
  private readonly ownChanges = new Set<Promise<WireConversation>>();
  private readonly links = new Map<string, { readonly share: string | undefined; readonly url: string }>();
  wasUnreachable = false; // the server could not be reached when the list was read last
  private next: string | null = null;
  readonly copies = new OfflineCopies();

  readonly shown = computed(() => {
    const all = [...this.all.value.values()].filter(({ id }) => !this.pendingDeletes.value.has(id));
    return all.sort((a, b) => b.updated_at - a.updated_at);
  });
  readonly groups = computed(() => groupByDay(this.shown.value, this.now.value));

  /** `onOwnChange` receives the conversation after each change made by this page. */
  constructor(private readonly onOwnChange: (head: WireConversation) => void = () => {}) {
    addEventListener("pagehide", () => this.pendingDeletes.value.forEach((id) => void rest.deleteConversation(id)));
    document.addEventListener("visibilitychange", () => (this.now.value = Date.now()));
  }

  find(id: string): WireConversation | undefined {
    return this.all.value.get(id);
  }

  /** Remember the link of a shared conversation while the page is open: the server returns it only once. */
  rememberLink({ id, metadata }: WireConversation, url: string): void {
    this.links.set(id, { share: metadata?.share, url });
  }

  /** The link of a shared conversation, if this page has made it. */
  linkOf({ id, metadata }: WireConversation): string | undefined {
    const link = this.links.get(id);
    return metadata?.share !== undefined && link?.share === metadata.share ? link.url : undefined;
  }

  isPendingDelete(id: string): boolean {
    return this.pendingDeletes.value.has(id);
  }

  // -- reading

  async refresh(): Promise<void> {
    try {
      const page = await rest.listConversations();
      this.removeDeleted(page);
      this.store(page.data);
      this.next = page.next;
      this.hasMore.value = page.has_more;
      this.state.value = "ready";
      this.wasUnreachable = false;
      void this.copies.saveList(page);
      await this.fetchPinned();
    } catch (error) {
      if (!this.lockIfUnauthorized(error) && !(await this.showCopies(error))) this.state.value = "failed";
    }
  }

  async saveListCopy(): Promise<void> {
    await this.copies.saveList({ data: this.shown.value.slice(0, MAX_LIST_COPY), has_more: false, next: null });
  }

  /** If the server is unreachable, show the conversations that this browser has copies of; false if there are none. */
  private async showCopies(error: unknown): Promise<boolean> {
    if (error instanceof rest.RequestError) return false;
    this.wasUnreachable = true;
    if (this.all.value.size > 0) return true;
    const page = await this.copies.list();
    if (page === null) return false;
    this.store(page.data);
    this.state.value = "ready";
    return true;
  }

  /** Lock the page if the error is a 401; returns whether it was. */
  lockIfUnauthorized(error: unknown): boolean {
    if (!(error instanceof rest.RequestError) || error.status !== 401) return false;
    void this.copies.clear();
    this.lockCode.value = error.code;
    this.state.value = "locked";
    return true;
  }

  async loadMore(): Promise<void> {
    if (this.next === null) return;
    const page = await rest.listConversations(this.next).catch(() => null);
    if (!page) return;
    this.store(page.data);
    this.next = page.next;
    this.hasMore.value = page.has_more;
  }

  /** Load pinned conversations by id: they are listed first however old they are. */
  private async fetchPinned(): Promise<void> {
    const missing = load<readonly string[]>("pinned", []).filter((id) => !this.find(id));
    const read = async (id: string) => {
      try {
        this.store([await rest.getConversation(id)]);
      } catch (error) {
        if (error instanceof rest.RequestError && error.status === 404) this.removeLocal(id);
      }
    };
    await Promise.all(missing.map(read));
  }

  /** Remove conversations that are missing from the first page although they would belong there: they were deleted. */
  private removeDeleted(first: rest.ListPage<WireConversation>): void {
    const listed = new Set(first.data.map(({ id }) => id));
    const oldest = first.has_more ? (first.data.at(-1)?.updated_at ?? 0) : -Infinity;
    const remaining = [...this.all.value].filter(([id, head]) => listed.has(id) || head.updated_at < oldest);
    this.all.value = new Map(remaining);
  }

  private store(heads: readonly WireConversation[]): void {
    const all = new Map(this.all.value);
    for (const head of heads) {
      const current = all.get(head.id);
      if (!current || current.rev <= head.rev) all.set(head.id, head); // an older response may arrive late
    }
    this.all.value = all;
    this.now.value = Date.now();
    this.savePinned();
  }

  /** Save which conversations are pinned, also those that are not loaded. */
  private savePinned(deleted?: string): void {
    const all = this.all.value;
    const before = load<readonly string[]>("pinned", []);
    const isKept = (id: string) => (all.has(id) ? isPinned(all.get(id)!.metadata) : id !== deleted);
    const pinned = [...new Set([...before, ...all.keys()])].filter(isKept);
    if (pinned.join() !== before.join()) save("pinned", pinned);
  }

  upsert(head: WireConversation): void {
    this.store([head]);
  }

  /** Wait for a change made by this page, and record it as its own before its notification arrives. */
  async trackOwnChange(change: Promise<WireConversation>): Promise<WireConversation> {
    this.ownChanges.add(change);
    try {
      const head = await change;
      this.applyOwnChange(head);
      return head;
    } finally {
      this.ownChanges.delete(change);
    }
  }

  /** Wait until no change made by this page is in flight. */
  async waitForOwnChanges(): Promise<void> {
    while (this.ownChanges.size > 0) await Promise.allSettled(this.ownChanges);
  }

  /** Apply a change made by this page. */
  applyOwnChange(head: WireConversation): void {
    this.onOwnChange(head);
    this.store([head]);
  }

  /** Remove a conversation that was deleted, here or elsewhere. */
  removeLocal(id: string): void {
    const all = new Map(this.all.value);
    all.delete(id);
    this.all.value = all;
    this.savePinned(id);
    void this.copies.remove(id);
    this.setRunning(id, []);
    this.markSeen(id);
  }

  // -- running responses and unseen answers

  setAllRunning(running: readonly RunningResponse[]): void {
    const all = new Map<string, string[]>();
    for (const { conversation_id, response_id } of running) {
      all.set(conversation_id, [...(all.get(conversation_id) ?? []), response_id]);
    }
    this.running.value = all;
  }

  setRunning(id: string, responses: readonly string[]): void {
    const all = new Map(this.running.value);
    if (responses.length > 0) all.set(id, responses);
    else all.delete(id);
    this.running.value = all;
  }

  runningIn(id: string): readonly string[] {
    return this.running.value.get(id) ?? [];
  }

  markUnseen(id: string): void {
    this.unseen.value = new Set([...this.unseen.value, id]);
  }

  markSeen(id: string): void {
    if (this.unseen.value.has(id)) this.unseen.value = new Set([...this.unseen.value].filter((other) => other !== id));
  }

  isUnseen(id: string): boolean {
    return this.unseen.value.has(id);
  }

  // -- changing

  async rename(id: string, title: string): Promise<void> {
    const before = this.find(id);
    if (!before || title === "" || title === before.title) return;
    this.store([{ ...before, title }]);
    try {
      await this.trackOwnChange(rest.updateConversation(id, { title }));
    } catch (error) {
      this.store([{ ...before, rev: this.find(id)?.rev ?? before.rev }]);
      toast(`Not renamed. ${(error as Error).message}`);
    }
  }

  async pin(id: string, pinned: boolean): Promise<void> {
    await this.changeMetadata(id, (metadata) => withPin(metadata, pinned));
  }

  /** Change the metadata; retries if another client changes it at the same time. */
  async changeMetadata(id: string, change: (metadata: Metadata | null | undefined) => Metadata): Promise<void> {
    let head = this.find(id);
    for (let tries = 0; head && tries < MAX_ATTEMPTS; tries++) {
      const metadata = change(head.metadata);
      if (sameMetadata(metadata, head.metadata)) return;
      try {
        // no revision check for a new conversation: its first answer changes the revision, and nobody else has written
        // metadata
        const rev = head.rev > 1 ? { rev: head.rev } : {};
        await this.trackOwnChange(rest.updateConversation(id, { metadata, ...rev }));
        return;
      } catch (error) {
        if (!(error instanceof rest.RequestError) || !error.current) {
          toast(`Not saved. ${(error as Error).message}`);
          return;
        }
        head = error.current;
      }
    }
  }

  /** Hide the conversation now and delete it on the server when that can no longer be undone. */
  remove(id: string, undone: () => void): void {
    const title = this.find(id)?.title ?? "Conversation";
    this.pendingDeletes.value = new Set([...this.pendingDeletes.value, id]);
    toast(`“${title}” deleted.`, {
      label: "Undo",
      run: () => {
        this.cancelDelete(id);
        undone();
      },
      expired: () => void this.deleteNow(id),
    });
  }

  private async deleteNow(id: string): Promise<void> {
    try {
      await rest.deleteConversation(id);
      this.removeLocal(id);
    } catch (error) {
      if (error instanceof rest.RequestError && error.status === 404) this.removeLocal(id);
      else toast(`Not deleted. ${(error as Error).message}`);
    }
    this.cancelDelete(id);
  }

  private cancelDelete(id: string): void {
    this.pendingDeletes.value = new Set([...this.pendingDeletes.value].filter((other) => other !== id));
  }
}

// -- Groups of the list: pinned, today, yesterday, last 7 days, last 30 days, then months

export interface Group {
  readonly name: string;
  readonly conversations: readonly WireConversation[];
}

const DAY_MS = 24 * 60 * 60 * 1000;

/** Group conversations, given newest first, by calendar day in the user's time zone. */
export function groupByDay(conversations: readonly WireConversation[], nowMs: number): readonly Group[] {
  const names = new Map<string, WireConversation[]>();
  const pinned = conversations.filter((conversation) => isPinned(conversation.metadata));
  if (pinned.length > 0) names.set("Pinned", pinned);
  for (const conversation of conversations) {
    if (isPinned(conversation.metadata)) continue;
    const name = dayName(conversation.updated_at * 1000, nowMs);
    const group = names.get(name) ?? [];
    group.push(conversation);
    names.set(name, group);
  }
  return [...names].map(([name, group]) => ({ name, conversations: group }));
}

function dayName(thenMs: number, nowMs: number): string {
  const days = calendarDay(nowMs) - calendarDay(thenMs);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days <= 7) return "Last 7 days";
  if (days <= 30) return "Last 30 days";
  const then = new Date(thenMs);
  const year = then.getFullYear() === new Date(nowMs).getFullYear() ? {} : ({ year: "numeric" } as const);
  return new Intl.DateTimeFormat("en", { month: "long", ...year }).format(then);
}

/** Number of the calendar day; not affected by daylight saving time. */
function calendarDay(ms: number): number {
  const date = new Date(ms);
  return Math.round(Date.UTC(date.getFullYear(), date.getMonth(), date.getDate()) / DAY_MS);
}
