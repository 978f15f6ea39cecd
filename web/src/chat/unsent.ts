// Written messages that are not sent: those queued behind the running answer, and those that the server refused.

import type { ReadonlySignal, Signal } from "@preact/signals";
import { announce } from "../app/notifications";
import { type Sampling, sampling, systemPrompt } from "../app/settings";
import type { Attachment, Attachments } from "./attachments";
import { Drafts, failedMessages, joinTexts, writtenText } from "./drafts";
import type { QueuedMessage, Thread } from "./thread";
import type { Message } from "./tree";

export class UnsentMessages {
  readonly drafts: Drafts;
  private readonly waiting = new Set<Thread>(); // threads whose queue is sent as soon as the server is ready

  /** `text`: content of the message box. */
  constructor(
    private readonly thread: ReadonlySignal<Thread>,
    private readonly text: Signal<string>,
    private readonly attachments: Attachments,
    private readonly isReady: ReadonlySignal<boolean>,
    private readonly send: (thread: Thread, message: QueuedMessage) => void,
  ) {
    this.drafts = new Drafts(thread, text);
    isReady.subscribe(() => this.sendWaiting());
  }

  /** Send a message when the running answer, and those to the messages queued before, have ended. */
  enqueue(text: string, files: readonly Attachment[] = []): void {
    const { queued } = this.thread.value;
    queued.value = [...queued.value, composeMessage(text, files)];
    announce(`Queued. ${queued.value.length} waiting.`);
  }

  /** Remove a queued message, and put it into an empty message box. */
  dequeue(message: QueuedMessage): void {
    const { queued, attachments } = this.thread.value;
    queued.value = queued.value.filter((each) => each !== message);
    if (this.text.value.trim() !== "" || attachments.value.length > 0) return;
    this.text.value = message.text;
    attachments.value = message.files;
  }

  /** Send the first queued message, if no answer is running. */
  sendFirst(thread = this.thread.value): void {
    const [first, ...rest] = thread.queued.value;
    if (!first || thread.live.value) return;
    thread.queued.value = rest;
    this.send(thread, first);
  }

  /** Send the first queued message as soon as the server is ready. */
  sendFirstWhenReady(thread: Thread): void {
    this.waiting.add(thread);
    this.sendWaiting();
  }

  private sendWaiting(): void {
    if (!this.isReady.value) return;
    for (const thread of this.waiting) {
      this.waiting.delete(thread);
      this.sendFirst(thread);
    }
  }

  /**
   * Move a refused new message, which the server has not stored, back into the message box if that is empty. The text
   * of an edited one is a draft of its editor after a reload.
   */
  takeBack(thread: Thread, refused: Message, reason: string): void {
    const isNew = refused.id.value === null && thread.tree.value.siblings(refused).length === 1; // not an edited one
    if (!isNew || thread.attachments.value.length > 0 || this.drafts.boxOf(thread) !== "") return;
    this.moveToBox(thread, [refused]);
    thread.refusal.value = `${reason}. Your message is in the message box again.`;
  }

  /** Move the failed messages of a new conversation, which is left, back into the message box. */
  takeBackFailed(thread: Thread): void {
    if (thread.id.value === null && thread.live.value === null) this.moveToBox(thread, failedMessages(thread));
  }

  private moveToBox(thread: Thread, messages: readonly Message[]): void {
    const { attachments } = thread;
    const tree = thread.tree.value;
    this.drafts.restore(thread, joinTexts(...messages.map(writtenText)));
    attachments.value = [...messages.flatMap((message) => this.attachments.sentWith(message)), ...attachments.value];
    for (const message of messages) for (const each of [...tree.childrenOf(message.key), message]) tree.remove(each);
  }

  /** Take what is written in the message box along to the thread that `show` shows. */
  carryTo(show: () => void): void {
    const written = this.text.value;
    const files = this.attachments.take();
    this.text.value = "";
    show();
    const { attachments } = this.thread.value;
    this.text.value = joinTexts(this.text.value, written);
    attachments.value = [...attachments.value, ...files];
  }
}

/** A message with the settings of this moment. `only` overrides the sampling. */
export function composeMessage(
  text: string,
  files: readonly Attachment[],
  only: Partial<Sampling> = {},
): QueuedMessage {
  return { text, files, settings: { ...sampling.value, ...only }, instructions: systemPrompt.value };
}
