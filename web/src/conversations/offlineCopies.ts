// Copies of the list and of the last conversations in the browser, to read them while the server is unreachable. They
// belong to one user, and are deleted when that user signs out or another one signs in.

import type { StoredItem, WireConversation } from "../api/frames";
import type { ListPage } from "../api/rest";

const MAX_CONVERSATIONS = 20; // the oldest copies are removed
const OWNER = "owner";
const LIST = "list";

export interface StoredConversation {
  readonly head: WireConversation;
  readonly items: readonly StoredItem[];
}

export class OfflineCopies {
  private owner: string | null = null; // user of this page, once known
  private pending: readonly (() => Promise<void>)[] = []; // copies to write when the user is known

  /** Record the signed-in user. Copies of another user are deleted. */
  async setOwner(owner: string): Promise<void> {
    this.owner = owner;
    await this.run(async (cache) => {
      if ((await read<string>(cache, OWNER)) === owner) return;
      for (const request of await cache.keys()) await cache.delete(request);
      await write(cache, OWNER, owner);
    });
    const pending = this.pending;
    this.pending = [];
    for (const copy of pending) await copy();
  }

  /** Delete all copies; this page writes no more. */
  async clear(): Promise<void> {
    this.owner = null;
    this.pending = [];
    if (isAvailable()) await caches.delete(cacheName()).catch(() => false);
  }

  saveList(page: ListPage<WireConversation>): Promise<void> {
    return this.save(LIST, page);
  }

  list(): Promise<ListPage<WireConversation> | null> {
    return this.run((cache) => read(cache, LIST));
  }

  async saveConversation(id: string, stored: StoredConversation): Promise<void> {
    await this.save(id, stored);
    await this.run(async (cache) => {
      const kept = [addressOf(OWNER), addressOf(LIST)];
      const copies = (await cache.keys()).filter(({ url }) => !kept.includes(url));
      for (const request of copies.slice(0, -MAX_CONVERSATIONS)) await cache.delete(request);
    });
  }

  conversation(id: string): Promise<StoredConversation | null> {
    return this.run((cache) => read(cache, id));
  }

  async remove(id: string): Promise<void> {
    await this.run((cache) => cache.delete(addressOf(id)));
  }

  private async save(name: string, value: unknown): Promise<void> {
    if (this.owner === null) {
      this.pending = [...this.pending, () => this.save(name, value)];
      return;
    }
    await this.run(async (cache) => {
      // another tab may have signed out
      if (this.owner !== null && (await read<string>(cache, OWNER)) === this.owner) await write(cache, name, value);
    });
  }

  /** Run an action on the storage; null if the browser has none or it is full. */
  private async run<T>(action: (cache: Cache) => Promise<T>): Promise<T | null> {
    if (!isAvailable()) return null;
    try {
      return await action(await caches.open(cacheName()));
    } catch {
      return null;
    }
  }
}

// Browsers offer it over https and on localhost only.
function isAvailable(): boolean {
  return "caches" in globalThis;
}

// The path is part of the name: several servers may share an origin, each below its own path.
function cacheName(): string {
  return `chatcache-copies ${new URL("./", document.baseURI).pathname}`;
}

function addressOf(name: string): string {
  return new URL(`copies/${encodeURIComponent(name)}`, document.baseURI).href;
}

async function read<T>(cache: Cache, name: string): Promise<T | null> {
  const found = await cache.match(addressOf(name));
  return found ? ((await found.json()) as T) : null;
}

async function write(cache: Cache, name: string, value: unknown): Promise<void> {
  await cache.delete(addressOf(name)); // the newest is last
  await cache.put(addressOf(name), new Response(JSON.stringify(value)));
}
