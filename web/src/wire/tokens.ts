// The tokens of a stored answer, and what the model could have said at each of them.
import { call, conversationPath } from "./rest";
import type { StoredItem } from "./frames";

/** One token; offsets count characters (code points) of the shown text, null where it shows nothing. */
export interface WireToken {
  readonly index: number;
  readonly start: number | null;
  readonly end: number | null;
}

export interface Alternative {
  readonly id: number;
  readonly text: string;
  readonly logprob: number;
  readonly probability: number;
  readonly ends: boolean; // it would end the answer: nothing can go on behind it
}

export interface Alternatives {
  readonly index: number;
  readonly token: Alternative & { readonly rank: number | null }; // null: beyond the 20 likeliest
  readonly alternatives: readonly Alternative[];
  readonly usage: { readonly input_tokens: number; readonly cached_tokens: number; readonly copied_pages: number };
}

export async function listTokens(conversation: string, item: string): Promise<readonly WireToken[]> {
  return (await call<{ data: readonly WireToken[] }>("GET", `${itemPath(conversation, item)}/tokens`)).data;
}

export function getAlternatives(conversation: string, item: string, index: number, top: number): Promise<Alternatives> {
  return call("GET", `${itemPath(conversation, item)}/tokens/${index}?top=${top}`);
}

export function getItem(conversation: string, item: string): Promise<StoredItem> {
  return call("GET", itemPath(conversation, item));
}

interface ListedItem {
  readonly type: string;
  readonly content?: readonly { readonly text: string }[];
}

/** What an answer's author thought before it; null if nothing is stored. */
export async function getReasoning(conversation: string, item: string): Promise<string | null> {
  const query = `leaf=${encodeURIComponent(item)}&order=desc&limit=2`;
  const list = await call<{ data: readonly ListedItem[] }>("GET", `${conversationPath(conversation)}/items?${query}`);
  const thought = list.data.find((entry) => entry.type === "reasoning");
  return thought?.content?.map((part) => part.text).join("") ?? null;
}

function itemPath(conversation: string, item: string): string {
  return `${conversationPath(conversation)}/items/${encodeURIComponent(item)}`;
}
