// Unsent texts of each conversation, kept across reloads: the message box, and the messages queued before it.

import { effect, type ReadonlySignal, type Signal, untracked } from "@preact/signals";
import { load, save } from "../app/browser";
import type { Thread } from "./thread";

const STORAGE_KEY = "drafts";
const SAVE_DELAY_MS = 300;
const MAX_DRAFTS = 50; // the oldest are removed
const MAX_CHARS = 50_000; // of a stored draft; a longer one is lost with the page
const NEW_CONVERSATION = "";

export class Drafts {
  private readonly drafts: Map<string, string>; // of the message box
  private readonly threads = new Set<Thread>(); // shown so far
  private key = NEW_CONVERSATION; // of the shown conversation
  private timer: ReturnType<typeof setTimeout> | undefined;

  /** Keep `text`, the content of the message box, in step with the shown thread. */
  constructor(
    thread: ReadonlySignal<Thread>,
    private readonly text: Signal<string>,
  ) {
    this.drafts = new Map(Object.entries(load<Record<string, string>>(STORAGE_KEY, {})));
    let shown: Thread | null = null;
    effect(() => {
      const now = thread.value;
      const id = keyOf(now);
      untracked(() => {
        if (now !== shown) text.value = this.drafts.get(id) ?? "";
        else if (id !== this.key) this.store(this.key, ""); // a new conversation got its id, and keeps its draft
        shown = now;
        this.key = id;
        this.store(id, text.value);
        if (this.threads.has(now)) return;
        this.threads.add(now);
        now.queued.subscribe(() => this.saveSoon());
      });
    });
    effect(() => this.store(this.key, text.value));
    addEventListener("pagehide", () => this.save());
  }

  /** Put a text into the message box of a thread, which may be hidden; false if another text is there. */
  restore(thread: Thread, text: string): boolean {
    const key = keyOf(thread);
    if (this.drafts.has(key)) return false;
    this.store(key, text);
    if (key === this.key) this.text.value = text;
    return true;
  }

  private store(key: string, text: string): void {
    if ((this.drafts.get(key) ?? "") === text) return;
    this.drafts.delete(key); // the newest is last
    if (text.trim() !== "") this.drafts.set(key, text);
    this.saveSoon();
  }

  private saveSoon(): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.save(), SAVE_DELAY_MS);
  }

  private save(): void {
    clearTimeout(this.timer);
    const texts = new Map(this.drafts);
    for (const thread of this.threads) {
      const key = keyOf(thread);
      texts.set(key, joinTexts(...thread.queued.peek().map(({ text }) => text), texts.get(key) ?? ""));
    }
    const stored = [...texts].filter(([, text]) => text !== "" && text.length <= MAX_CHARS).slice(-MAX_DRAFTS);
    save(STORAGE_KEY, Object.fromEntries(stored));
  }
}

function keyOf({ id }: Thread): string {
  return id.value ?? NEW_CONVERSATION;
}

/** Join messages to one, with an empty line between them. */
export function joinTexts(...texts: readonly string[]): string {
  return texts.filter(Boolean).join("\n\n");
}
