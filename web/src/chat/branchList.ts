// The branches of a conversation: messages of their own, tokens shared with others, and how many of them are cached.

import { deleteItem, type PromptCoverage } from "../api/rest";
import { toast } from "../app/notifications";
import type { Chat } from "./chat";
import type { Message, Tree } from "./tree";

export interface Branch {
  readonly leaf: Message;
  readonly path: readonly Message[];
  readonly ownFrom: number; // index in `path` of the first message that no other branch has
}

export interface BranchTokens {
  readonly shared: number; // with at least one other branch
  readonly total: number;
  readonly cold: number; // not in the cache
}

/** Return every branch, in the order of its first message. */
export function listBranches(tree: Tree): readonly Branch[] {
  const found: Branch[] = [];
  const stack = tree
    .childrenOf(null)
    .map((message) => [message])
    .reverse();
  for (let path = stack.pop(); path; path = stack.pop()) {
    const leaf = path.at(-1)!;
    const children = tree.childrenOf(leaf.key);
    for (const child of children.toReversed()) stack.push([...path, child]);
    if (children.length > 0) continue;
    const lastFork = path.findLastIndex((message) => tree.siblings(message).length > 1);
    found.push({ leaf, path, ownFrom: Math.max(0, lastFork) });
  }
  return found;
}

/** First message of a branch's own: it stays the same while the branch grows. */
export const ownStart = ({ path, ownFrom }: Branch): Message => path[ownFrom]!;

/** Input of a request that goes on after a branch, to look up its pages: a prompt ends with a user message. */
export const NEXT_INPUT = [{ role: "user", content: "?" }] as const;

export const ownText = ({ path, ownFrom }: Branch): string =>
  path
    .slice(ownFrom)
    .map(({ text }) => text.value)
    .join("\n\n");

/** Count the tokens of a branch in a prompt that goes on after it; null if they are not known by message. */
export function countTokens({ path, ownFrom }: Branch, prompt: Pick<PromptCoverage, "messages">): BranchTokens | null {
  const messages = prompt.messages?.slice(0, -1) ?? []; // without the message that goes on
  const before = messages.length - path.length; // a system prompt
  if (before < 0 || before > 1) return null;
  const sum = (some: typeof messages) => some.reduce((all, { tokens }) => all + tokens, 0);
  const total = sum(messages);
  const cached = messages.reduce((all, { cached_tokens }) => all + cached_tokens, 0);
  return { shared: ownFrom === 0 ? 0 : sum(messages.slice(0, before + ownFrom)), total, cold: total - cached };
}

// -- Names and stars of branches, stored in one entry of the conversation's metadata by the id of their first own message

export interface BranchMark {
  readonly name: string;
  readonly starred: boolean;
}

type Metadata = Readonly<Record<string, string>>;

const KEY = "branches";
const MAX_CHARS = 512; // of a metadata value
export const MAX_NAME_CHARS = 40;

/** Read the marks, which another client may have written. */
export function readMarks(metadata: Metadata | null | undefined): Readonly<Record<string, BranchMark>> {
  try {
    const stored = JSON.parse(metadata?.[KEY] ?? "{}") as Record<string, unknown>;
    return Object.fromEntries(
      Object.entries(stored).flatMap(([id, value]) =>
        Array.isArray(value) ? [[id, { starred: value[0] === 1, name: String(value[1] ?? "") }]] : [],
      ),
    );
  } catch {
    return {};
  }
}

/** Name of a branch: the one that was given to it, or its number from 1. */
export function branchName(branch: Branch, number: number, marks: Readonly<Record<string, BranchMark>>): string {
  return marks[ownStart(branch).id.value ?? ""]?.name || `Branch ${number}`;
}

/** Return the metadata with the mark of one branch; null if there is no room for it. */
export function withMark(metadata: Metadata | null | undefined, id: string, mark: BranchMark): Metadata | null {
  const { [KEY]: _, ...rest } = metadata ?? {};
  const marks = Object.entries({ ...readMarks(metadata), [id]: mark }).filter(([, each]) => each.starred || each.name);
  if (marks.length === 0) return rest;
  const text = JSON.stringify(Object.fromEntries(marks.map(([key, { starred, name }]) => [key, [+starred, name]])));
  return text.length > MAX_CHARS ? null : { ...rest, [KEY]: text };
}

/** Delete the messages that only this branch has, the last one first. */
export async function removeBranch(chat: Chat, { path, ownFrom }: Branch): Promise<void> {
  const thread = chat.thread.value;
  const conversation = thread.id.value;
  if (thread.live.value || conversation === null) return;
  await chat.edits.flush();
  try {
    for (const message of path.slice(ownFrom).toReversed()) {
      const item = message.id.value;
      if (item !== null) await chat.conversations.trackOwnChange(deleteItem(conversation, item));
      thread.tree.value.remove(message);
    }
    toast("Branch deleted.");
  } catch (error) {
    toast(`Not deleted. ${(error as Error).message}`);
  }
  await chat.loader.refresh(thread, conversation);
}
