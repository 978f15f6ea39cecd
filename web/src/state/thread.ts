// One conversation as the page holds it: the tree, the turns that made it, and whether one is still running.
import { computed, signal } from "@preact/signals";
import type { StoredItem } from "../wire/frames";
import { type Message, type Status, Tree } from "./tree";
import { Turn, usageOf } from "./turn";

export type ThreadState = "ready" | "loading" | "failed" | "missing";

export class Thread {
  readonly id = signal<string | null>(null);
  readonly state = signal<ThreadState>("ready");
  readonly settling = signal(false); // an answer may still turn up on the server
  readonly tree = signal(new Tree());
  readonly live = signal<Turn | null>(null);
  readonly next = signal<readonly string[]>([]); // what a starter suggests to ask after this answer
  private turns = new Map<string, Turn>();

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

  /** Replace the tree by what the server stored. */
  load(items: readonly StoredItem[], activeLeaf: string | null): void {
    const tree = new Tree();
    const turns = new Map<string, Turn>();
    const groups = new Map<string, { items: StoredItem[]; messages: Message[] }>();
    for (const item of items) {
      if (item.role !== "user" && item.role !== "assistant") continue;
      const turn = item.role === "assistant" ? item.response_id : null;
      const message = tree.add(
        {
          key: item.id,
          id: item.id,
          parent: item.parent_id,
          role: item.role,
          turn,
          text: item.content.map((part) => part.text).join(""),
          status: statusOf(item),
        },
        (item.index ?? 0) === 0, // of the candidates, the first; of the turns, the newest
      );
      message.tokens.value = item.num_tokens;
      if (turn === null) continue;
      const group = groups.get(turn) ?? { items: [], messages: [] };
      group.items.push(item);
      group.messages.push(message);
      groups.set(turn, group);
    }
    for (const [key, group] of groups) {
      const turn = new Turn(key, group.messages);
      const usage = group.items[0]?.usage;
      if (usage) turn.usage.value = usageOf(usage);
      turn.responseId.value = key;
      turn.phase.value = "ended";
      turn.open.value = false;
      turns.set(key, turn);
    }
    const leaf = activeLeaf === null ? undefined : tree.byId(activeLeaf);
    if (leaf) tree.reveal(leaf);
    this.turns = turns;
    this.tree.value = tree;
  }
}

function statusOf(item: StoredItem): Status {
  if (item.status === "in_progress") return "streaming";
  if (item.finish_reason === "length") return "length";
  if (item.finish_reason === "cancelled") return "stopped";
  return "done";
}
