// Unsent texts, kept across reloads: of each conversation the message box and the messages queued before it, and of
// each message the texts of its editors.

import { effect, type ReadonlySignal, type Signal, untracked } from "@preact/signals";
import { load, save } from "../app/browser";
import { splitMessage } from "./attachments";
import type { Thread } from "./thread";
import type { Message } from "./tree";

export const QUESTION_EDITOR = "Edit message"; // label of the editor
const STORAGE_KEY = "drafts";
const SAVE_DELAY_MS = 300;
const MAX_DRAFTS = 50; // the oldest are removed
const MAX_CHARS = 50_000; // of a stored draft; a longer one is lost with the page
const NEW_CONVERSATION = "";
const UNSTORED = "unstored "; // before keys that mean nothing after a reload

/** The newest version of a message. */
interface Edit {
  readonly thread: Thread;
  readonly edited: Message;
}

export class Drafts {
  private readonly drafts: Map<string, string>; // of the message box and of editors
  private readonly edits = new Map<Message, Edit>(); // by the original, until they are stored on the server
  private readonly threads = new Set<Thread>(); // shown so far
  private saved: ReadonlyMap<string, string>; // of this page; other pages change other texts
  private key = NEW_CONVERSATION; // of the shown conversation
  private timer: ReturnType<typeof setTimeout> | undefined;

  /** Keep `text`, the content of the message box, in step with the shown thread. */
  constructor(
    thread: ReadonlySignal<Thread>,
    private readonly text: Signal<string>,
  ) {
    this.saved = loadStored();
    this.drafts = new Map(this.saved);
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

  /** The text in the message box of a thread, which may be hidden. */
  boxOf(thread: Thread): string {
    return this.drafts.get(keyOf(thread)) ?? "";
  }

  /** Put a text into the message box of a thread, before what is there. */
  restore(thread: Thread, text: string): void {
    const key = keyOf(thread);
    this.store(key, joinTexts(text, this.boxOf(thread)));
    if (key === this.key) this.text.value = this.boxOf(thread);
  }

  /** The text of an editor that was not cancelled, or whose message the server refused. */
  editOf(message: Message, editor: string): string | undefined {
    return this.drafts.get(editKey(message, editor));
  }

  /** Keep the text of an editor for when it is opened again; null: there is nothing to keep. */
  keepEdit(message: Message, editor: string, text: string | null): void {
    this.store(editKey(message, editor), text ?? "");
  }

  /** Keep the text of a new version of a message until it is stored on the server. */
  trackEdit(thread: Thread, edited: Message, original: Message): void {
    const refused = [...this.edits].find(([, edit]) => edit.edited === original);
    this.edits.set(refused?.[0] ?? original, { thread, edited });
  }

  private store(key: string, text: string): void {
    if ((this.drafts.get(key) ?? "") === text) return;
    this.drafts.delete(key); // the newest is last
    if (text.trim() !== "") this.drafts.set(key, text);
    this.saveSoon();
  }

  saveSoon(): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.save(), SAVE_DELAY_MS);
  }

  private save(): void {
    clearTimeout(this.timer);
    const texts = new Map(this.drafts);
    for (const thread of this.threads) {
      const key = keyOf(thread);
      const queued = thread.queued.peek().map(({ text }) => text);
      texts.set(key, joinTexts(...failedMessages(thread).map(writtenText), ...queued, texts.get(key) ?? ""));
    }
    for (const [original, { thread, edited }] of this.edits) {
      const isDeleted = thread.tree.peek().get(edited.key) === undefined;
      if (edited.id.peek() !== null || isDeleted) this.edits.delete(original);
      else texts.set(editKey(original, QUESTION_EDITOR), writtenText(edited));
    }
    const stored = loadStored();
    for (const key of new Set([...this.saved.keys(), ...texts.keys()])) {
      const text = texts.get(key) ?? "";
      if (text === (this.saved.get(key) ?? "")) continue;
      stored.delete(key); // the newest is last
      if (text !== "" && text.length <= MAX_CHARS && !key.startsWith(UNSTORED)) stored.set(key, text);
    }
    this.saved = texts;
    save(STORAGE_KEY, Object.fromEntries([...stored].slice(-MAX_DRAFTS)));
  }
}

function loadStored(): Map<string, string> {
  return new Map(Object.entries(load<Record<string, string>>(STORAGE_KEY, {})));
}

function keyOf({ id }: Thread): string {
  return id.value ?? NEW_CONVERSATION;
}

function editKey({ id, key }: Message, editor: string): string {
  return `${id.peek() ?? UNSTORED + key} ${editor}`;
}

/** The messages that the server has not stored, because each answer to them failed; not edited ones. */
export function failedMessages({ tree: { value: tree } }: Thread): readonly Message[] {
  return [...tree.all()].filter(
    (message) =>
      message.role === "user" &&
      tree.chosenChild(message.parent) === message &&
      tree.siblings(message).every(({ id }) => id.peek() === null) &&
      tree.childrenOf(message.key).every(({ status }) => status.peek() === "error"),
  );
}

/** The text of a message without its files. */
export function writtenText({ text }: Message): string {
  return splitMessage(text.peek()).text;
}

/** Join messages to one, with an empty line between them. */
export function joinTexts(...texts: readonly string[]): string {
  return texts.filter(Boolean).join("\n\n");
}
