// The message tree of a conversation: parents, ordered siblings, and the chosen child of each message. The page shows
// the path from the root through the chosen children.
import { computed, type Signal, signal } from "@preact/signals";
import type { WireCall } from "../api/frames";

type Role = "user" | "assistant";
export type Status = "waiting" | "streaming" | "done" | "stopped" | "steered" | "interrupted" | "length" | "error";

/** Notes on answers that ended before the model did. */
export const ENDINGS: Readonly<Partial<Record<Status, string>>> = {
  stopped: "Stopped.",
  steered: "Stopped by your next message.",
  interrupted: "Interrupted.",
  length: "Cut at the token limit.",
};

export interface Usage {
  readonly inputTokens: number;
  readonly cachedTokens: number;
  readonly outputTokens: number;
  readonly reasoningTokens?: number;
}

export interface Message {
  readonly key: string; // local key, stable until a reload
  parent: string | null; // changed only by the tree
  readonly role: Role;
  readonly turn: string | null; // shared by the candidates of one request
  readonly id: Signal<string | null>; // id on the server, once assigned
  readonly text: Signal<string>;
  readonly reasoning: Signal<string>;
  readonly status: Signal<Status>;
  readonly error: Signal<string>; // why it failed, or a note on how it ended
  readonly tokens: Signal<number | null>; // number of stored tokens; null: unknown
  readonly calls: Signal<readonly WireCall[]>; // of functions
  readonly callRuns: Signal<ReadonlyMap<string, CallRun>>; // by call_id
  readonly callOutputs: Signal<readonly CallOutput[]>; // sent before this message, to the calls of the one above
}

/** A call that this page runs or has run; a call without one waits for the user. */
export type CallRun =
  | { readonly phase: "running"; readonly stop: () => void }
  | {
      readonly phase: "done";
      readonly output: string;
      readonly isError: boolean;
      readonly seconds: number | null; // null: it was not called
    };

/** The output of a function that an answer called. */
export interface CallOutput {
  readonly callId: string;
  readonly text: string;
}

interface NewMessage {
  key: string;
  parent: string | null;
  role: Role;
  turn?: string | null;
  id?: string | null;
  text?: string;
  status?: Status;
}

/** A removed message and its place, to put it back. */
export interface RemovedMessage {
  readonly message: Message;
  readonly index: number; // among its siblings
  readonly children: readonly string[];
  readonly chosen: string | undefined; // its chosen child
  readonly wasChosen: boolean;
}

export class Tree {
  private messages = new Map<string, Message>();
  private children = new Map<string | null, string[]>();
  private chosen = new Map<string | null, string>();
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

  /** Add a message as the newest child of its parent, and choose it unless `choose` is false. */
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
      calls: signal([]),
      callRuns: signal(new Map()),
      callOutputs: signal([]),
    };
    this.attach(message, choose);
    return message;
  }

  /** Attach an existing message, possibly of another tree, without replacing the object. */
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

  /** Messages with the same parent, oldest first. */
  siblings(message: Message): readonly Message[] {
    return this.childrenOf(message.parent);
  }

  /** The siblings that a user can switch to, and the message itself: not the answers that failed without a text. */
  versions(message: Message): readonly Message[] {
    const isFailure = ({ key, status, text }: Message) =>
      status.value === "error" && text.value === "" && this.childrenOf(key).length === 0;
    return this.siblings(message).filter((sibling) => sibling === message || !isFailure(sibling));
  }

  /** The id of the nearest stored message from `key` upwards; null at a root. */
  nearestStored(key: string | null): string | null {
    for (let at = key === null ? undefined : this.get(key); at; at = this.get(at.parent ?? ""))
      if (at.id.value !== null) return at.id.value;
    return null;
  }

  /** Children of a message, oldest first; of null: the roots. */
  childrenOf(parent: string | null): readonly Message[] {
    void this.version.value;
    return (this.children.get(parent) ?? []).map((key) => this.messages.get(key)!);
  }

  choose(message: Message): void {
    this.chosen.set(message.parent, message.key);
    this.version.value++;
  }

  /** Choose `message` and all its ancestors. */
  reveal(message: Message): void {
    for (let at: Message | undefined = message; at; at = at.parent === null ? undefined : this.get(at.parent)) {
      this.chosen.set(at.parent, at.key);
    }
    this.version.value++;
  }

  /** Remove a message; its children take its place. */
  remove(message: Message): RemovedMessage {
    const { key, parent } = message;
    const children = this.children.get(key) ?? [];
    const siblings = this.children.get(parent) ?? [];
    const index = siblings.indexOf(key);
    const chosen = this.chosen.get(key);
    const wasChosen = this.chosen.get(parent) === key;
    for (const child of children) this.messages.get(child)!.parent = parent;
    const left = siblings.toSpliced(index, 1, ...children);
    this.children.set(parent, left);
    this.children.delete(key);
    this.chosen.delete(key);
    this.messages.delete(key);
    const next = chosen ?? left[Math.min(index, left.length - 1)];
    if (wasChosen && next === undefined) this.chosen.delete(parent);
    else if (wasChosen) this.chosen.set(parent, next!);
    this.version.value++;
    return { message, index, children, chosen, wasChosen };
  }

  /** Put a removed message back, above the children that took its place. */
  restore({ message, index, children, chosen, wasChosen }: RemovedMessage): void {
    const { key, parent } = message;
    const back = children.filter((child) => this.messages.get(child)?.parent === parent);
    for (const child of back) this.messages.get(child)!.parent = key;
    const siblings = (this.children.get(parent) ?? []).filter((other) => !back.includes(other));
    this.children.set(parent, siblings.toSpliced(index, 0, key));
    this.children.set(key, back);
    this.messages.set(key, message);
    if (chosen !== undefined && back.includes(chosen)) this.chosen.set(key, chosen);
    if (wasChosen) this.chosen.set(parent, key);
    this.version.value++;
  }

  /** Take over the content of another tree, which is not used any more; references to this tree stay valid. */
  replaceWith(other: Tree): void {
    this.messages = other.messages;
    this.children = other.children;
    this.chosen = other.chosen;
    this.version.value++;
  }

  /** Copy the choices of another tree with the same keys, where the message still exists. */
  copyChoices(other: Tree): void {
    for (const [parent, key] of other.chosen) if (this.messages.has(key)) this.chosen.set(parent, key);
    this.version.value++;
  }

  /** The chosen child. */
  chosenChild(parent: string | null): Message | undefined {
    const key = this.chosen.get(parent);
    return key === undefined ? undefined : this.messages.get(key);
  }
}
