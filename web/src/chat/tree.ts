// The conversation as a tree of messages: parents, siblings in order, and which child is chosen at every fork.
// The path from the root through the chosen children is what the page shows.
import { computed, type Signal, signal } from "@preact/signals";

export type Role = "user" | "assistant";
export type Status = "waiting" | "streaming" | "done" | "stopped" | "length" | "error";

export interface Usage {
  readonly inputTokens: number;
  readonly cachedTokens: number;
  readonly outputTokens: number;
  readonly reasoningTokens?: number;
}

export interface Message {
  readonly key: string; // the page's own name; lasts from the first keystroke to a reload
  readonly parent: string | null;
  readonly role: Role;
  readonly turn: string | null; // candidates of one request share it
  readonly id: Signal<string | null>; // the server's name, once it gave one
  readonly text: Signal<string>;
  readonly reasoning: Signal<string>; // what it reasoned before it spoke
  readonly status: Signal<Status>;
  readonly error: Signal<string>;
  readonly tokens: Signal<number | null>; // how many the server stored; null: not told
}

export interface NewMessage {
  key: string;
  parent: string | null;
  role: Role;
  turn?: string | null;
  id?: string | null;
  text?: string;
  status?: Status;
}

export class Tree {
  private readonly messages = new Map<string, Message>();
  private readonly children = new Map<string | null, string[]>();
  private readonly chosen = new Map<string | null, string>();
  private readonly version = signal(0);

  readonly path = computed<readonly Message[]>(() => {
    void this.version.value;
    const path: Message[] = [];
    for (let at = this.chosenChild(null); at; at = this.chosenChild(at.key)) path.push(at);
    return path;
  });

  readonly leaf = computed<Message | null>(() => this.path.value.at(-1) ?? null);

  get size(): number {
    return this.messages.size;
  }

  get(key: string): Message | undefined {
    return this.messages.get(key);
  }

  byId(id: string): Message | undefined {
    for (const message of this.messages.values()) if (message.id.value === id) return message;
    return undefined;
  }

  /** Add a message as the newest child of its parent; it becomes the chosen one unless `choose` is false. */
  add(init: NewMessage, choose = true): Message {
    const message: Message = {
      key: init.key,
      parent: init.parent,
      role: init.role,
      turn: init.turn ?? null,
      id: signal(init.id ?? null),
      text: signal(init.text ?? ""),
      reasoning: signal(""),
      status: signal(init.status ?? "done"),
      error: signal(""),
      tokens: signal(null),
    };
    this.attach(message, choose);
    return message;
  }

  /** Take a message as it is, of another tree perhaps: what shows it need not notice. */
  attach(message: Message, choose = true): void {
    this.messages.set(message.key, message);
    const siblings = this.children.get(message.parent) ?? [];
    siblings.push(message.key);
    this.children.set(message.parent, siblings);
    if (choose || siblings.length === 1) this.chosen.set(message.parent, message.key);
    this.version.value++;
  }

  all(): Iterable<Message> {
    return this.messages.values();
  }

  /** All messages with the same parent and role, oldest first. */
  siblings(message: Message): readonly Message[] {
    void this.version.value;
    return (this.children.get(message.parent) ?? []).map((key) => this.messages.get(key)!);
  }

  /** The messages below one, oldest first; of null, the roots. */
  childrenOf(parent: string | null): readonly Message[] {
    void this.version.value;
    return (this.children.get(parent) ?? []).map((key) => this.messages.get(key)!);
  }

  /** The candidates that one request made together with `message`. */
  candidates(message: Message): readonly Message[] {
    if (message.turn === null) return [message];
    return this.siblings(message).filter((sibling) => sibling.turn === message.turn);
  }

  choose(message: Message): void {
    this.chosen.set(message.parent, message.key);
    this.version.value++;
  }

  /** Make `message` part of the path: choose it and every ancestor. */
  reveal(message: Message): void {
    for (let at: Message | undefined = message; at; at = at.parent === null ? undefined : this.get(at.parent)) {
      this.chosen.set(at.parent, at.key);
    }
    this.version.value++;
  }

  /** Hold what another tree holds. Who holds this one goes on with it. */
  replaceWith(other: Tree): void {
    for (const [mine, theirs] of [
      [this.messages, other.messages],
      [this.children, other.children],
      [this.chosen, other.chosen],
    ] as const) {
      (mine as Map<unknown, unknown>).clear();
      for (const [key, value] of theirs) (mine as Map<unknown, unknown>).set(key, value);
    }
    this.version.value++;
  }

  /** Choose what another tree with the same keys had chosen, where it is still there. */
  copyChoices(other: Tree): void {
    for (const [parent, key] of other.chosen) if (this.messages.has(key)) this.chosen.set(parent, key);
    this.version.value++;
  }

  /** The child that the path goes on with. */
  chosenChild(parent: string | null): Message | undefined {
    const key = this.chosen.get(parent);
    return key === undefined ? undefined : this.messages.get(key);
  }
}
