// One conversation as the page holds it: the tree, the turns that made it, and whether one is still running.

import { computed, signal } from "@preact/signals";
import type { StoredItem, WireConversation } from "../api/frames";
import { type Message, type Status, Tree } from "./tree";
import { Turn, toUsage } from "./turn";

export type ThreadState = "ready" | "loading" | "failed" | "missing";

export class Thread {
  readonly id = signal<string | null>(null);
  readonly state = signal<ThreadState>("ready");
  readonly awaitingServer = signal(false); // an answer may still turn up on the server
  readonly tree = signal(new Tree());
  readonly live = signal<Turn | null>(null);
  readonly suggestions = signal<readonly string[]>([]); // what a starter suggests to ask after this answer
  readonly staleCheck = new StaleCheck();
  isLoaded = false; // what the server had was read, or there was nothing yet
  followsActiveLeaf = true; // at the last load, whether the active branch was the one shown
  private readonly turns = new Map<string, Turn>();
  private listed: ReadonlySet<string> = new Set();
  private activeLeaf: string | null = null; // as the server last told
  private followedLeaf: Message | null = null; // the end of the path after the last load, of who followed: shown still, nobody chose

  /** Tokens that the next turn starts from, as far as the last one told. */
  readonly contextTokens = computed<number>(() => {
    void this.live.value; // turns come and end without the path changing
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

  addTurn(turn: Turn): void {
    this.turns.set(turn.key, turn);
    this.live.value = turn;
  }

  /** The turn that made a response, if the page has it. */
  turnOfResponse(response: string): Turn | undefined {
    for (const turn of this.turns.values()) if (turn.responseId.value === response) return turn;
    return undefined;
  }

  /** A change that the page made, or watched happen. */
  recordOwnChange(head: WireConversation): void {
    this.staleCheck.markSeen(head.rev);
    if (!this.staleCheck.isStale(head.rev)) this.activeLeaf = head.active_leaf;
  }

  /** It came since the last load and has ended: written here or read along, it was the active leaf when it came. */
  private isNew({ id }: Message): boolean {
    return this.isLoaded && this.live.value === null && id.value !== null && !this.listed.has(id.value);
  }

  /** The server lists what it said. */
  private markSaved(response: string): void {
    const turn = this.turnOfResponse(response);
    if (turn?.unsaved.value) turn.unsaved.value = false;
  }

  /** Take what the server stored. Who was looking at the active branch follows it; nobody else is moved. */
  load(items: readonly StoredItem[], head: WireConversation): void {
    const shown = this.tree.value.leaf.value;
    this.followsActiveLeaf =
      shown === null || shown === this.followedLeaf || shown.id.value === this.activeLeaf || this.isNew(shown);
    this.isLoaded = true;
    const { tree, responses } = mergeStored(this.tree.value, this.turns.values(), items, this.listed);
    for (const [key, response] of responses) this.turns.set(key, storedTurn(key, response));
    for (const item of items)
      if (item.response_id !== null && item.status !== "in_progress") this.markSaved(item.response_id);
    const leaf = head.active_leaf === null ? undefined : tree.byId(head.active_leaf);
    if (leaf && this.followsActiveLeaf) tree.reveal(leaf);
    const moved = leaf && shown !== null && tree.leaf.value !== shown ? this.turnOf(leaf) : undefined;
    if (moved?.candidates.includes(shown!)) moved.showsCandidates.value = false; // picked elsewhere
    this.listed = new Set(items.map((item) => item.id));
    this.activeLeaf = head.active_leaf;
    this.staleCheck.markRead(head.rev);
    this.tree.value.replaceWith(tree);
    this.followedLeaf = this.followsActiveLeaf ? this.tree.value.leaf.value : null;
  }
}

function storedTurn(key: string, { items, messages }: StoredResponse): Turn {
  const turn = new Turn(key, messages);
  const usage = items[0]?.usage;
  if (usage) turn.usage.value = toUsage(usage);
  turn.responseId.value = key;
  turn.phase.value = "ended";
  turn.showsCandidates.value = false;
  return turn;
}

// ---- Which changes of a conversation the page has seen. Every change has a number of its own, so what the page did itself
// need not be read back, and what somebody else did is never taken for it.

export class StaleCheck {
  private seen = 0; // everything up to here
  private readonly ahead = new Set<number>();

  /** All of the conversation was read as it stood then. */
  markRead(rev: number): void {
    this.seen = Math.max(this.seen, rev);
    this.advance();
  }

  /** That one change is known: the page made it, or watched it happen. */
  markSeen(rev: number): void {
    if (rev > this.seen) this.ahead.add(rev);
    this.advance();
  }

  /** Whether a conversation that stands at `rev` holds something the page has not seen. */
  isStale(rev: number): boolean {
    return rev > this.seen;
  }

  private advance(): void {
    while (this.ahead.delete(this.seen + 1)) this.seen++;
    for (const rev of this.ahead) if (rev <= this.seen) this.ahead.delete(rev);
  }
}

// ---- What the server stored, joined with what the page shows: messages that are there already stay the same objects.

/** Messages of one response that the page has no turn for yet. */
export interface StoredResponse {
  readonly items: StoredItem[];
  readonly messages: Message[];
}

export interface MergeResult {
  readonly tree: Tree;
  readonly responses: ReadonlyMap<string, StoredResponse>;
}

/**
 * `items`: oldest first. `listed`: the ids that an earlier list had; a message of those that is missing now is gone. What
 * the server never listed (unsent, failed, or newer than the list) stays below what it followed.
 */
function mergeStored(
  before: Tree,
  turns: Iterable<Turn>,
  items: readonly StoredItem[],
  listed: ReadonlySet<string>,
): MergeResult {
  const tree = new Tree();
  const responses = new Map<string, StoredResponse>();
  const known = messageFinder(before, turns);
  const keys = new Map<string, string | null>(); // message id -> its key; of what is not shown, the key it hangs below
  for (const item of items) {
    const parent = item.parent_id === null ? null : (keys.get(item.parent_id) ?? null);
    if (item.role !== "user" && item.role !== "assistant") {
      keys.set(item.id, parent);
      continue;
    }
    const mine = known(item);
    const first = (item.index ?? 0) === 0; // of the candidates, the first; of the turns, the newest
    if (mine && mine.parent === parent) {
      applyStored(mine, item);
      tree.attach(mine, first);
      keys.set(item.id, mine.key);
    } else {
      const message = addStored(tree, item, parent, first);
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
  return { tree, responses };
}

/** Finds the page's own message of an item: by its id, or as the candidate of a response that had no id yet. */
function messageFinder(before: Tree, turns: Iterable<Turn>): (item: StoredItem) => Message | undefined {
  const byId = new Map<string, Message>();
  for (const message of before.all()) if (message.id.value !== null) byId.set(message.id.value, message);
  const byResponse = new Map<string, Turn>();
  for (const turn of turns) if (turn.responseId.value !== null) byResponse.set(turn.responseId.value, turn);
  return (item) => {
    const mine = byId.get(item.id);
    if (mine || item.response_id === null || item.role !== "assistant") return mine;
    const candidate = byResponse.get(item.response_id)?.candidates[item.index ?? 0];
    return candidate?.id.value === null ? candidate : undefined;
  };
}

/** What is stored is final. */
function applyStored(message: Message, item: StoredItem): void {
  message.id.value = item.id;
  message.tokens.value = item.num_tokens ?? 0;
  if (item.status === "in_progress") return;
  message.text.value = textOf(item);
  message.status.value = statusOf(item);
}

function addStored(tree: Tree, item: StoredItem, parent: string | null, choose: boolean): Message {
  const role = item.role === "user" ? "user" : "assistant";
  const turn = role === "assistant" ? item.response_id : null;
  const init = { key: item.id, id: item.id, parent, role, turn, text: textOf(item), status: statusOf(item) } as const;
  const message = tree.add(init, choose);
  message.tokens.value = item.num_tokens ?? 0;
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
  if (item.finish_reason === "cancelled") return "stopped";
  return "done";
}
