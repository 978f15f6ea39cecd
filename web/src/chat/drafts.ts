// Unsent texts of the message box, one for each conversation, kept across reloads.

import { effect, type ReadonlySignal, type Signal, untracked } from "@preact/signals";
import { load, save } from "../app/browser";
import type { Thread } from "./thread";

const STORAGE_KEY = "drafts";
const SAVE_DELAY_MS = 300;
const MAX_DRAFTS = 50; // the oldest are removed
const MAX_CHARS = 50_000; // of a stored draft; a longer one is lost with the page
const NEW_CONVERSATION = "";

export class Drafts {
  private readonly drafts: Map<string, string>;
  private timer: ReturnType<typeof setTimeout> | undefined;

  /** Keep `text`, the content of the message box, in step with the shown thread. */
  constructor(thread: ReadonlySignal<Thread>, text: Signal<string>) {
    this.drafts = new Map(Object.entries(load<Record<string, string>>(STORAGE_KEY, {})));
    let shown: Thread | null = null;
    let key = NEW_CONVERSATION;
    effect(() => {
      const now = thread.value;
      const id = now.id.value ?? NEW_CONVERSATION;
      untracked(() => {
        if (now !== shown) text.value = this.drafts.get(id) ?? "";
        else if (id !== key) this.store(key, ""); // a new conversation got its id, and keeps its draft
        shown = now;
        key = id;
        this.store(key, text.value);
      });
    });
    effect(() => this.store(key, text.value));
    addEventListener("pagehide", () => this.save());
  }

  private store(key: string, text: string): void {
    if ((this.drafts.get(key) ?? "") === text) return;
    this.drafts.delete(key); // the newest is last
    if (text.trim() !== "") this.drafts.set(key, text);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.save(), SAVE_DELAY_MS);
  }

  private save(): void {
    clearTimeout(this.timer);
    const stored = [...this.drafts].filter(([, text]) => text.length <= MAX_CHARS).slice(-MAX_DRAFTS);
    save(STORAGE_KEY, Object.fromEntries(stored));
  }
}
