// What the server stored, joined with what the page shows: messages that are there already stay the same objects.
import type { StoredItem } from "../wire/frames";
import { type Message, type Status, Tree } from "./tree";
import type { Turn } from "./turn";

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
export function mergeStored(before: Tree, turns: Iterable<Turn>, items: readonly StoredItem[], listed: ReadonlySet<string>): MergeResult {
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

function groupByResponse(responses: Map<string, StoredResponse>, response: string, item: StoredItem, message: Message): void {
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
