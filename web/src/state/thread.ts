// One conversation as the page holds it: the tree, the turns that made it, and whether one is still running.
import { computed, signal } from "@preact/signals";
import type { StoredItem, WireConversation } from "../wire/frames";
import { type StoredResponse, mergeStored } from "./merge";
import { StaleCheck } from "./revisions";
import { type Message, Tree } from "./tree";
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
      if (turn && usage) return usage.inputTokens + Math.round(usage.outputTokens / Math.max(1, turn.candidates.length));
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
    this.followsActiveLeaf = shown === null || shown === this.followedLeaf || shown.id.value === this.activeLeaf || this.isNew(shown);
    this.isLoaded = true;
    const { tree, responses } = mergeStored(this.tree.value, this.turns.values(), items, this.listed);
    for (const [key, response] of responses) this.turns.set(key, storedTurn(key, response));
    for (const item of items) if (item.response_id !== null && item.status !== "in_progress") this.markSaved(item.response_id);
    const leaf = head.active_leaf === null ? undefined : tree.byId(head.active_leaf);
    if (leaf && this.followsActiveLeaf) tree.reveal(leaf);
    const moved = leaf && shown !== null && tree.leaf.value !== shown ? this.turnOf(leaf) : undefined;
    if (moved && moved.candidates.includes(shown!)) moved.showsCandidates.value = false; // picked elsewhere
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
