// One conversation: its message tree, its turns, the running one, and merging with the messages stored on the server.

import { computed, signal } from "@preact/signals";
import type { StoredItem, WireConversation } from "../api/frames";
import type { Sampling } from "../app/settings";
import type { ConversationSettings } from "../conversations/metadata";
import type { Attachment } from "./attachments";
import { type CallOutput, type Message, type Status, Tree } from "./tree";
import { Turn, toUsage } from "./turn";

/** A message written during an answer, with the settings of that moment. */
export interface QueuedMessage {
  readonly text: string;
  readonly files: readonly Attachment[];
  readonly settings: Sampling;
  readonly instructions: string;
}

type ThreadState = "ready" | "loading" | "failed" | "missing";

export class Thread {
  readonly id = signal<string | null>(null);
  readonly state = signal<ThreadState>("ready");
  readonly awaitingServer = signal(false); // an answer may still arrive from the server
  readonly tree = signal(new Tree());
  readonly live = signal<Turn | null>(null);
  readonly suggestions = signal<readonly string[]>([]); // follow-up messages suggested by a starter
  readonly queued = signal<readonly QueuedMessage[]>([]); // sent one by one when the running answer ends
  readonly refusal = signal(""); // why the last message was refused and is in the message box again
  readonly compared = signal<readonly Message[] | null>(null); // answers of several requests, shown side by side
  readonly hidden = new Set<string>(); // ids of messages whose deletion can still be undone
  // Tools that run without a question. Not stored: conversations are imported, too.
  readonly allowedTools = new Set<string>();
  readonly staleCheck = new StaleCheck();
  settings: ConversationSettings | null = null; // that it was left with, and that were not stored then
  isLoaded = false; // the messages are loaded, or the conversation is new
  followsActiveLeaf = true; // at the last load, whether the shown branch was the active one
  private readonly turns = new Map<string, Turn>();
  private listed: ReadonlySet<string> = new Set();
  private keys: ReadonlyMap<string, string | null> = new Map();
  private activeLeaf: string | null = null; // as last reported by the server
  private followedLeaf: Message | null = null; // last shown leaf if the user followed the active branch

  /** `attachments`: files of the message that is being written. */
  constructor(readonly attachments = signal<readonly Attachment[]>([])) {}

  /** Number of tokens before the next turn, as reported by the last one. */
  readonly contextTokens = computed<number>(() => {
    void this.live.value; // turns start and end without a change of the path
    const path = this.tree.value.path.value;
    for (let index = path.length - 1; index >= 0; index--) {
      const turn = this.turnOf(path[index]!);
      const usage = turn?.usage.value;
      if (turn && usage)
        return usage.inputTokens + Math.round(usage.outputTokens / Math.max(1, turn.candidates.length));
    }
    return 0;
  });

  turnOf(message: Message): Turn | undefined {
    return message.turn === null ? undefined : this.turns.get(message.turn);
  }

  /** The user message that an answer follows. */
  questionOf(answer: Message): Message | undefined {
    const above = answer.parent === null ? undefined : this.tree.value.get(answer.parent);
    return above?.role === "user" ? above : undefined;
  }

  /** The answers that are shown side by side with this one; null if it is shown alone. */
  comparedWith(answer: Message): readonly Message[] | null {
    const answers = this.compared.value;
    const remain = answers?.includes(answer) && answers.every(({ key }) => this.tree.value.get(key));
    return remain ? answers : null;
  }

  /** The message of a stored item; of an item that is not shown, the one above it. */
  messageOf(item: string): Message | undefined {
    return this.tree.value.byId(item) ?? this.tree.value.get(this.keys.get(item) ?? "");
  }

  addTurn(turn: Turn): void {
    this.turns.set(turn.key, turn);
    this.live.value = turn;
  }

  /** Return the turn of a response, if it is loaded. */
  turnOfResponse(response: string): Turn | undefined {
    for (const turn of this.turns.values()) if (turn.responseId.value === response) return turn;
    return undefined;
  }

  /** Whether a request was sent that the server has not answered yet. */
  get awaitsIds(): boolean {
    return [...this.turns.values()].some((turn) => turn.isUnanswered);
  }

  /** Record a change that this page made or observed. */
  recordOwnChange(head: WireConversation): void {
    this.staleCheck.markSeen(head.rev);
    if (!this.staleCheck.isStale(head.rev)) this.activeLeaf = head.active_leaf;
  }

  /** True for a finished message newer than the last load: it was the active leaf when it arrived. */
  private isNew({ id }: Message): boolean {
    return this.isLoaded && this.live.value === null && id.value !== null && !this.listed.has(id.value);
  }

  /** Clear the unsaved flag of a response that the server lists. */
  private markSaved(response: string): void {
    const turn = this.turnOfResponse(response);
    if (turn?.unsaved.value) turn.unsaved.value = false;
  }

  /** Forget the ids of messages that the server does not list: it lost them, and refuses requests that name them. */
  forgetUnlistedIds(): void {
    for (const { id } of this.tree.value.all()) if (id.value !== null && !this.listed.has(id.value)) id.value = null;
  }

  /** Merge the stored messages. The shown branch changes only if the user was following the active one. */
  load(items: readonly StoredItem[], head: WireConversation): void {
    const shown = this.tree.value.leaf.value;
    this.followsActiveLeaf =
      shown === null || shown === this.followedLeaf || shown.id.value === this.activeLeaf || this.isNew(shown);
    this.isLoaded = true;
    const { tree, responses, keys } = mergeStored(
      this.tree.value,
      this.turns.values(),
      items,
      this.listed,
      this.hidden,
    );
    for (const [key, response] of responses) this.turns.set(key, storedTurn(key, response));
    for (const item of items)
      if (item.response_id !== null && item.status !== "in_progress") this.markSaved(item.response_id);
    const leaf = head.active_leaf === null ? undefined : tree.byId(head.active_leaf);
    if (leaf && this.followsActiveLeaf) tree.reveal(leaf);
    const moved = leaf && shown !== null && tree.leaf.value !== shown ? this.turnOf(leaf) : undefined;
    if (moved?.candidates.includes(shown!)) moved.showsCandidates.value = false; // picked in another tab
    this.listed = new Set(items.map((item) => item.id));
    this.keys = keys;
    this.activeLeaf = head.active_leaf;
    this.staleCheck.markRead(head.rev);
    this.tree.value.replaceWith(tree);
    this.followedLeaf = this.followsActiveLeaf ? this.tree.value.leaf.value : null;
  }
}

/** The finished messages of a thread in the server's form. `known`: items of the server, which are kept as they are. */
export function itemsOf(thread: Thread, known: readonly StoredItem[]): readonly StoredItem[] {
  const byId = new Map(known.map((item) => [item.id, item]));
  const items: StoredItem[] = [];
  for (const message of thread.tree.value.all()) {
    const { id, status, text, tokens, role } = message;
    if (id.value === null || ["waiting", "streaming", "error"].includes(status.value)) continue;
    const turn = thread.turnOf(message);
    const isWhole = status.value === "done" || status.value === "length";
    items.push(
      byId.get(id.value) ?? {
        id: id.value,
        role,
        status: isWhole ? "completed" : "incomplete",
        content: [{ type: "text", text: text.value }],
        parent_id: thread.tree.value.nearestStored(message.parent),
        response_id: turn?.responseId.value ?? null,
        index: turn ? turn.candidates.indexOf(message) : null,
        num_tokens: tokens.value,
        finish_reason: status.value === "length" ? "length" : status.value === "stopped" ? "cancelled" : null,
        created_at: 0,
        ...(isWhole || status.value === "stopped" ? {} : { incomplete_details: { reason: status.value } }),
      },
    );
  }
  return items;
}

function storedTurn(key: string, { items, messages }: StoredResponse): Turn {
  const figures = items[0]?.statistics;
  const keepTokens = figures?.fork_at ?? null;
  const start = keepTokens === null ? null : { item: "", keepTokens, token: null, inspectedPages: null };
  const turn = new Turn(key, messages, false, start);
  const usage = items[0]?.usage;
  if (usage) turn.usage.value = toUsage(usage);
  if (figures) turn.restore(figures);
  turn.responseId.value = key;
  turn.phase.value = "ended";
  turn.showsCandidates.value = false;
  return turn;
}

// -- Stale check: revisions of a conversation that the page has seen. Each change has its own revision number, so own
// changes need no reload, and changes made elsewhere are always detected.

export class StaleCheck {
  private seen = 0; // all revisions up to this one
  private readonly ahead = new Set<number>();

  /** The whole conversation was read at this revision. */
  markRead(rev: number): void {
    this.seen = Math.max(this.seen, rev);
    this.advance();
  }

  /** One change is known: the page made or observed it. */
  markSeen(rev: number): void {
    if (rev > this.seen) this.ahead.add(rev);
    this.advance();
  }

  /** Whether the conversation at `rev` contains a change that the page has not seen. */
  isStale(rev: number): boolean {
    return rev > this.seen;
  }

  private advance(): void {
    while (this.ahead.delete(this.seen + 1)) this.seen++;
    for (const rev of this.ahead) if (rev <= this.seen) this.ahead.delete(rev);
  }
}

// -- Merge of stored messages into the shown tree: messages that are shown already stay the same objects

/** Messages of one response without a turn. */
interface StoredResponse {
  readonly items: StoredItem[];
  readonly messages: Message[];
}

interface MergeResult {
  readonly tree: Tree;
  readonly responses: ReadonlyMap<string, StoredResponse>;
  // message id -> key; of hidden items, the key of their nearest shown ancestor
  readonly keys: ReadonlyMap<string, string | null>;
}

/**
 * `items`: oldest first. `listed`: ids of the previous load; a message that was listed before and is missing now was
 * deleted. Messages that were never listed (unsent, failed, or newer than the list) stay below their parent.
 */
function mergeStored(
  before: Tree,
  turns: Iterable<Turn>,
  items: readonly StoredItem[],
  listed: ReadonlySet<string>,
  hidden: ReadonlySet<string>,
): MergeResult {
  const tree = new Tree();
  const responses = new Map<string, StoredResponse>();
  const findMessage = messageFinder(before, turns);
  const keys = new Map<string, string | null>();
  const outputs = new Map<string, readonly CallOutput[]>(); // of an item that is not shown and those above it
  for (const item of items) {
    const parent = item.parent_id === null ? null : (keys.get(item.parent_id) ?? null);
    const above = outputs.get(item.parent_id ?? "") ?? [];
    if (item.call_id !== undefined) outputs.set(item.id, [...above, { callId: item.call_id, text: textOf(item) }]);
    if ((item.role !== "user" && item.role !== "assistant") || hidden.has(item.id)) {
      keys.set(item.id, parent);
      continue;
    }
    const existing = findMessage(item);
    const first = (item.index ?? 0) === 0; // choose the first candidate, and the newest turn
    if (existing) {
      existing.parent = parentOf(before, existing, parent); // another one if the message above was deleted
      existing.callOutputs.value = above;
      applyStored(existing, item);
      tree.attach(existing, first);
      keys.set(item.id, existing.key);
    } else {
      const message = addStored(tree, item, parent, first);
      message.callOutputs.value = above;
      keys.set(item.id, message.key);
      if (message.turn !== null) groupByResponse(responses, message.turn, item, message);
    }
  }
  for (const message of before.all()) {
    const id = message.id.value;
    if (tree.get(message.key) || (id !== null && (keys.has(id) || listed.has(id)))) continue;
    if (message.parent === null || tree.get(message.parent)) tree.attach(message, false);
  }
  tree.copyChoices(before);
  return { tree, responses, keys };
}

/** The parent of a shown message: the stored one, unless a turn between them failed and was not stored. */
function parentOf(before: Tree, message: Message, stored: string | null): string | null {
  let at = message.parent;
  while (at !== stored && at !== null) {
    const above = before.get(at);
    if (!above || above.id.value !== null) return stored;
    at = above.parent;
  }
  return at === stored ? message.parent : stored;
}

/** Find the shown message of an item: by id, or as a candidate of its response that has no id yet. */
function messageFinder(before: Tree, turns: Iterable<Turn>): (item: StoredItem) => Message | undefined {
  const byId = new Map<string, Message>();
  for (const message of before.all()) if (message.id.value !== null) byId.set(message.id.value, message);
  const byResponse = new Map<string, Turn>();
  for (const turn of turns) if (turn.responseId.value !== null) byResponse.set(turn.responseId.value, turn);
  return (item) => {
    const existing = byId.get(item.id);
    if (existing || item.response_id === null || item.role !== "assistant") return existing;
    const candidate = byResponse.get(item.response_id)?.candidates[item.index ?? 0];
    return candidate?.id.value === null ? candidate : undefined;
  };
}

/** Apply the stored text and status, which are final. */
function applyStored(message: Message, item: StoredItem): void {
  message.id.value = item.id;
  message.tokens.value = item.num_tokens ?? 0;
  if (item.status === "in_progress") return;
  message.calls.value = item.calls ?? [];
  // this page has received more than a killed server had stored
  if (message.status.value === "interrupted" && message.text.value.startsWith(textOf(item))) return;
  message.text.value = textOf(item);
  message.status.value = statusOf(item);
}

function addStored(tree: Tree, item: StoredItem, parent: string | null, choose: boolean): Message {
  const role = item.role === "user" ? "user" : "assistant";
  const turn = role === "assistant" ? item.response_id : null;
  const init = { key: item.id, id: item.id, parent, role, turn, text: textOf(item), status: statusOf(item) } as const;
  const message = tree.add(init, choose);
  message.tokens.value = item.num_tokens ?? 0;
  message.calls.value = item.calls ?? [];
  return message;
}

function groupByResponse(
  responses: Map<string, StoredResponse>,
  response: string,
  item: StoredItem,
  message: Message,
): void {
  const found = responses.get(response) ?? { items: [], messages: [] };
  found.items.push(item);
  found.messages.push(message);
  responses.set(response, found);
}

function textOf(item: StoredItem): string {
  return item.content.map((part) => part.text).join("");
}

function statusOf(item: StoredItem): Status {
  if (item.status === "in_progress") return "streaming";
  if (item.finish_reason === "length") return "length";
  const reason = item.incomplete_details?.reason;
  if (reason === "interrupted" || reason === "steered") return reason;
  if (item.finish_reason === "cancelled") return "stopped";
  if (item.status === "incomplete" && item.role === "assistant") return "interrupted";
  return "done";
}
