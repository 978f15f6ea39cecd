// REST client: conversations, tokens of stored messages, the page map, and sessions.
import type { Continuation, StoredItem, WireConversation, WireResponse } from "./frames";

const KEEPALIVE: RequestInit = { keepalive: true }; // the request is sent even if the page closes

export interface ListPage<T> {
  readonly data: readonly T[];
  readonly has_more: boolean;
  readonly next: string | null; // cursor of the next page
}

interface ItemPage extends ListPage<StoredItem> {
  readonly total: number; // of all pages
}

/** [start, end] in characters (code points). */
export type TextRange = readonly [number, number];

/** Location of the search terms in a conversation. */
interface SearchMatch {
  readonly item_id: string | null;
  readonly role: string | null;
  readonly snippet: { readonly text: string; readonly marks: readonly TextRange[] } | null;
  readonly title_marks: readonly TextRange[];
}

export interface SearchHit extends WireConversation {
  readonly match: SearchMatch;
}

export interface ImportReport {
  readonly created: number;
  readonly extended: number;
  readonly unchanged: number;
  readonly failed: number;
  readonly data: readonly {
    readonly id?: string;
    readonly status: string;
    readonly error?: { readonly message: string };
  }[];
}

export interface CacheCoverage {
  readonly conversation_id: string;
  readonly tokens: number;
  readonly cached_tokens: number;
}

export class RequestError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly current: WireConversation | null = null, // for status 409: the current state of the conversation
    readonly code = "",
  ) {
    super(message);
  }
}

export function listConversations(after?: string): Promise<ListPage<WireConversation>> {
  return call("GET", `v1/conversations?limit=50${after ? `&after=${encodeURIComponent(after)}` : ""}`);
}

export function searchConversations(query: string, after?: string): Promise<ListPage<SearchHit>> {
  const rest = after ? `&after=${encodeURIComponent(after)}` : "";
  return call("GET", `v1/conversations?limit=30&query=${encodeURIComponent(query)}${rest}`);
}

export function getConversation(id: string): Promise<WireConversation> {
  return call("GET", conversationPath(id));
}

/** Return every message of every branch, oldest first. `known`: finished messages that were listed first before. */
export async function listItems(id: string, known: readonly StoredItem[] = []): Promise<readonly StoredItem[]> {
  const route = `${conversationPath(id)}/items?branches=all`;
  if (known.length > 0) {
    const { data, total } = await call<ItemPage>("GET", `${route}&order=desc&limit=20`);
    const numAdded = data.findIndex((item) => item.id === known.at(-1)!.id);
    if (numAdded >= 0 && total === known.length + numAdded) return [...known, ...data.slice(0, numAdded).reverse()];
  }
  return (await call<ItemPage>("GET", route)).data; // the first reading, a message was deleted, or many were added
}

interface ConversationChange {
  readonly title?: string;
  readonly active_leaf?: string;
  readonly metadata?: Readonly<Record<string, string>>;
  readonly rev?: number; // 409 if the conversation has another revision
}

export function updateConversation(id: string, change: ConversationChange): Promise<WireConversation> {
  return call("POST", conversationPath(id), change, KEEPALIVE);
}

export function deleteConversation(id: string): Promise<unknown> {
  return call("DELETE", conversationPath(id), undefined, KEEPALIVE);
}

/** Let the model generate a title. With `rev`: only if the conversation has that revision. */
export async function generateTitle(id: string, rev?: number): Promise<WireConversation> {
  const answer = await call<{ conversation: WireConversation }>(
    "POST",
    `${conversationPath(id)}/title`,
    rev === undefined ? {} : { rev },
  );
  return answer.conversation;
}

export async function getCacheCoverage(ids: readonly string[]): Promise<readonly CacheCoverage[]> {
  return (await call<{ data: readonly CacheCoverage[] }>("POST", "v1/cache/warmth", { conversations: ids })).data;
}

export type ExportFormat = "json" | "markdown" | "html";

/** Export one conversation; `null` exports all of them. `branch`: the last message of the branch to read. */
export async function exportFile(id: string | null, format: ExportFormat = "json", branch?: string): Promise<Blob> {
  const query = `format=${format}${branch ? `&branch=${encodeURIComponent(branch)}` : ""}`;
  const route = id === null ? "v1/conversations/export" : `${conversationPath(id)}/export?${query}`;
  return (await request("GET", route)).blob();
}

interface Share {
  readonly path: string; // of the link, with its secret
  readonly conversation: WireConversation;
}

/** Make a link to the path to `leaf` (undefined: the active one) that needs no key. An older link ends. */
export function shareConversation(id: string, leaf?: string): Promise<Share> {
  return call("POST", `${conversationPath(id)}/share`, leaf ? { leaf } : {});
}

export function endShare(id: string): Promise<WireConversation> {
  return call("DELETE", `${conversationPath(id)}/share`);
}

export async function importFile(file: Blob, contentType: string): Promise<ImportReport> {
  const response = await request("POST", "v1/conversations/import", {
    body: file,
    headers: { "content-type": contentType },
  });
  return (await response.json()) as ImportReport;
}

export interface WireAttachment {
  readonly filename: string;
  readonly num_pages: number | null; // of a PDF
  readonly num_tokens: number;
  readonly text: string; // the block to put into a message
}

/** Let the server read a file. */
export async function readAttachment(file: Blob, name: string): Promise<WireAttachment> {
  const response = await request("POST", `v1/attachments?filename=${encodeURIComponent(name)}`, {
    body: file,
    headers: { "content-type": "application/octet-stream" },
  });
  return (await response.json()) as WireAttachment;
}

export interface PromptCoverage {
  readonly prompt_tokens: number;
  readonly cached_tokens: number;
  readonly messages: readonly { readonly tokens: number; readonly cached_tokens: number }[] | null;
  readonly pages: readonly PromptPage[];
}

interface PromptPage {
  readonly map_index: number | null; // null: not on the device, or the server has several workers
  readonly text?: string; // of a cached page, on request
}

interface ExplainRequest extends Continuation {
  readonly instructions?: string;
  readonly page_texts?: true;
}

/** Number of prompt tokens of a request, how many are in the cache, and on which pages. */
export function explainPrompt(prompt: ExplainRequest): Promise<PromptCoverage> {
  return call("POST", "v1/cache/explain", prompt);
}

function conversationPath(id: string): string {
  return `v1/conversations/${encodeURIComponent(id)}`;
}

export async function call<T>(method: string, route: string, body?: unknown, how: RequestInit = {}): Promise<T> {
  const init: RequestInit = { ...how };
  if (body !== undefined) {
    init.body = JSON.stringify(body);
    init.headers = { "content-type": "application/json", ...how.headers };
  }
  return (await (await request(method, route, init)).json()) as T;
}

/** Send a request; raises RequestError with the server's error message. */
async function request(method: string, route: string, init: RequestInit = {}): Promise<Response> {
  const response = await fetch(new URL(route, document.baseURI), { ...init, method, credentials: "same-origin" });
  if (response.ok) return response;
  let body: { message?: string; code?: string; conversation?: WireConversation } = {};
  try {
    body = ((await response.json()) as { error?: typeof body }).error ?? {};
  } catch {
    // not a JSON error of this API: a proxy answered
  }
  throw new RequestError(
    body.message ?? `The server answered ${response.status}.`,
    response.status,
    body.conversation,
    body.code,
  );
}

// -- Tokens of a text

export function tokenize(prompt: string): Promise<{ tokens: readonly number[]; token_strs: readonly string[] }> {
  return call("POST", "tokenize", { prompt, add_special_tokens: false, return_token_strs: true });
}

export function detokenize(tokens: readonly number[]): Promise<{ prompt: string }> {
  return call("POST", "detokenize", { tokens });
}

// -- Tokens of a stored answer and their alternatives

/** One token. Offsets count characters (code points) of the text; null if the token shows no text. */
interface WireToken {
  readonly index: number;
  readonly start: number | null;
  readonly end: number | null;
}

export interface Alternative {
  readonly id: number;
  readonly text: string;
  readonly logprob: number;
  readonly probability: number;
  readonly ends: boolean; // an end-of-sequence token: the answer cannot continue after it
}

export interface Alternatives {
  readonly index: number;
  readonly token: Alternative & { readonly rank: number | null }; // null: not among the 20 most likely tokens
  readonly alternatives: readonly Alternative[];
  readonly usage: { readonly input_tokens: number; readonly cached_tokens: number; readonly copied_pages: number };
}

export async function listTokens(conversation: string, item: string): Promise<readonly WireToken[]> {
  return (await call<{ data: readonly WireToken[] }>("GET", `${itemPath(conversation, item)}/tokens`)).data;
}

export type TokenScore = Pick<Alternatives, "index" | "token" | "alternatives">;

/** Probabilities of all tokens of an answer, and the `top` most likely ones at each: one pass of the model. */
export async function scoreTokens(conversation: string, item: string, top: number): Promise<readonly TokenScore[]> {
  return (await call<{ data: readonly TokenScore[] }>("GET", `${itemPath(conversation, item)}/tokens?top=${top}`)).data;
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

/** Return the stored reasoning of an answer, which is above its text and its calls; null if there is none. */
export async function getReasoning(conversation: string, item: string, numCalls: number): Promise<string | null> {
  const query = `leaf=${encodeURIComponent(item)}&order=desc&limit=${2 + numCalls}`;
  const list = await call<{ data: readonly ListedItem[] }>("GET", `${conversationPath(conversation)}/items?${query}`);
  const thought = list.data.find((entry) => entry.type === "reasoning");
  return thought?.content?.map((part) => part.text).join("") ?? null;
}

/** Add an answer without generating; returns its id. `parent`: the message that it follows, or "root". */
export async function addAnswer(conversation: string, parent: string, text: string): Promise<string> {
  const items = [{ role: "assistant", content: text }];
  const route = `${conversationPath(conversation)}/items`;
  return (await call<ListPage<StoredItem>>("POST", route, { items, parent_id: parent })).data.at(-1)!.id;
}

/** Delete one message; returns the conversation. */
export function deleteItem(conversation: string, item: string): Promise<WireConversation> {
  return call("DELETE", itemPath(conversation, item), undefined, KEEPALIVE);
}

/** Copy the branch that ends with the message `leaf` into a new conversation. */
export function branchConversation(id: string, leaf: string, title: string): Promise<WireConversation> {
  return call("POST", `${conversationPath(id)}/branch`, { leaf, title });
}

function itemPath(conversation: string, item: string): string {
  return `${conversationPath(conversation)}/items/${encodeURIComponent(item)}`;
}

/** Return a response, running or stored, with the settings of its request. */
export function getResponse(id: string): Promise<WireResponse> {
  return call("GET", `v1/responses/${encodeURIComponent(id)}`);
}

// -- State of every KV page

export interface CacheMap {
  readonly page_size: number; // in tokens
  readonly num_pages: number;
  // over 1 if there are more than 4,096 pages; the cell then has the state of its busiest page
  readonly pages_per_cell: number;
  readonly cells: string; // one character per cell, in page order
}

export function getCacheMap(): Promise<CacheMap> {
  return call("GET", "v1/cache/map");
}

// -- The server in counts, for its administrators

export interface AdminKey {
  readonly id: string;
  readonly tenant: string;
  readonly user: string;
  readonly name: string;
  readonly is_admin: boolean;
  readonly requests_per_minute: number | null; // null: no limit
  readonly tokens_per_minute: number | null;
  readonly max_concurrent: number | null;
  readonly tokens_per_day: number | null;
  readonly tokens_today: number;
  readonly revoked_at: number | null;
}

interface AdminServer {
  readonly ready: boolean;
  readonly model: string;
  readonly version: string;
  readonly uptime_s: number;
  readonly num_running: number;
  readonly num_waiting: number;
  readonly num_pages: number;
  readonly num_pages_in_use: number;
  readonly num_prompt_tokens: number;
  readonly num_cached_tokens: number;
  readonly num_output_tokens: number;
  readonly num_preemptions: number;
  readonly num_evictions: number;
  readonly num_restarts: number;
  readonly workers: readonly {
    readonly name: string;
    readonly num_requests: number;
    readonly num_prompt_tokens: number;
    readonly num_cached_tokens: number;
  }[];
}

export interface AdminOverview {
  readonly keys: readonly AdminKey[];
  readonly users: readonly { readonly tenant: string; readonly user: string; readonly conversations: number }[];
  readonly tenants: readonly {
    readonly tenant: string;
    readonly keys: number;
    readonly conversations: number;
    readonly pages_in_use: number;
  }[];
  readonly server: AdminServer;
}

export function getAdminOverview(): Promise<AdminOverview> {
  return call("GET", "v1/admin");
}

// -- Sign-in. The API key is sent once and never stored: the server answers with an HttpOnly cookie, which the browser
// sends with REST requests and with the WebSocket handshake.

/** The signed-in user; `key_id` is null if the server does not use API keys. */
export interface Identity {
  readonly key_id: string | null;
  readonly tenant: string;
  readonly user: string;
  readonly is_admin: boolean;
}

export function signIn(key: string): Promise<Identity> {
  return call("POST", "v1/session", undefined, { headers: { authorization: `Bearer ${key}` } });
}

export function signOut(): Promise<unknown> {
  return call("DELETE", "v1/session");
}

export function getIdentity(): Promise<Identity> {
  return call("GET", "v1/session");
}
