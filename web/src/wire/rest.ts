// The conversations, over REST.
import { apiKey } from "./key";
import type { StoredItem, WireConversation } from "./frames";

interface Page<T> {
  readonly data: readonly T[];
  readonly last_id: string | null;
  readonly has_more: boolean;
}

export class RequestFailed extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

export function listConversations(after?: string): Promise<Page<WireConversation>> {
  return call("GET", `v1/conversations?limit=50${after ? `&after=${encodeURIComponent(after)}` : ""}`);
}

export function getConversation(id: string): Promise<WireConversation> {
  return call("GET", path(id));
}

/** Every message of every branch, oldest first. */
export async function listItems(id: string): Promise<readonly StoredItem[]> {
  const page = await call<Page<StoredItem>>("GET", `${path(id)}/items?branches=all`);
  return page.data;
}

export interface ConversationChange {
  readonly title?: string;
  readonly active_leaf?: string;
  readonly metadata?: Readonly<Record<string, string>>;
}

export function updateConversation(id: string, change: ConversationChange): Promise<WireConversation> {
  return call("POST", path(id), change);
}

export function deleteConversation(id: string): Promise<unknown> {
  return call("DELETE", path(id));
}

export function path(id: string): string {
  return `v1/conversations/${encodeURIComponent(id)}`;
}

export async function call<T>(method: string, route: string, body?: unknown): Promise<T> {
  // keepalive: a deletion may be the last thing that a closing page does
  const init: RequestInit = { method, credentials: "same-origin", keepalive: method === "DELETE" };
  const headers: Record<string, string> = {};
  if (apiKey.value) headers["authorization"] = `Bearer ${apiKey.value}`;
  if (body !== undefined) {
    init.body = JSON.stringify(body);
    headers["content-type"] = "application/json";
  }
  init.headers = headers;
  const response = await fetch(new URL(route, document.baseURI), init);
  if (response.ok) return (await response.json()) as T;
  let message = `The server answered ${response.status}.`;
  try {
    message = ((await response.json()) as { error: { message: string } }).error.message;
  } catch {
    // not our JSON: a proxy answered
  }
  throw new RequestFailed(message, response.status);
}
