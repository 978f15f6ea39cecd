// Synchronises with changes made elsewhere (other tabs, other devices, responses that continued while this page was
// away): reloads the shown conversation when it has changed, and follows its running responses.

import { signal } from "@preact/signals";
import type { ServerFrame, WireConversation } from "../api/frames";
import type { Socket } from "../api/socket";
import type { Conversations } from "../conversations/conversations";
import type { ConversationLoader } from "./conversationLoader";
import type { ResponseStreams } from "./responseStreams";
import type { Thread } from "./thread";

const DEBOUNCE_MS = 50; // a change made by this page is reported twice; wait until it is known as its own

const MAX_ATTEMPTS = 3; // the conversation may change while it is read; the next notification triggers the rest

interface RemoteChanges {
  readonly shown: () => Thread;
  /** Another client changed a conversation: its head before and after. */
  readonly changed: (before: WireConversation | undefined, now: WireConversation) => void;
  readonly deleted: (id: string) => void;
}

export class LiveSync {
  readonly subscribed = signal(false);
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly socket: Socket,
    private readonly conversations: Conversations,
    private readonly loader: ConversationLoader,
    private readonly streams: ResponseStreams,
    private readonly remote: RemoteChanges,
  ) {
    socket.state.subscribe((state) => {
      if (state !== "open") this.subscribed.value = false;
    });
  }

  /** Subscribe to notifications on a new connection. */
  subscribe(): void {
    this.socket.send({ type: "conversation.subscribe" });
  }

  /** Handle a frame of the subscription. */
  receive(frame: ServerFrame): void {
    if (frame.type === "conversation.subscribed" || frame.type === "conversation.missed") {
      this.conversations.setAllRunning(frame.running);
      this.subscribed.value = true;
      if (frame.type === "conversation.missed") void this.conversations.refresh();
      void this.refreshThread(this.remote.shown());
    } else if (frame.type === "conversation.updated" && frame.running) {
      this.onUpdated(frame.conversation, frame.running);
    } else if (frame.type === "conversation.deleted") {
      this.conversations.removeLocal(frame.conversation_id);
      this.remote.deleted(frame.conversation_id);
    }
  }

  /** Load changes that were missed while disconnected. Call it for every thread that is shown. */
  async refreshThread(thread: Thread): Promise<void> {
    const id = thread.id.value;
    if (id === null || !this.subscribed.value || thread.state.value !== "ready") return;
    await this.loader.loadHead(id);
    await this.syncThread(thread);
  }

  /** Load changes of a thread, and follow its running responses. */
  async syncThread(thread: Thread): Promise<void> {
    const id = thread.id.value;
    if (id === null || thread.state.value !== "ready") return;
    await this.conversations.waitForOwnChanges();
    for (
      let tries = 0;
      tries < MAX_ATTEMPTS && thread.staleCheck.isStale(this.conversations.find(id)?.rev ?? 0);
      tries++
    ) {
      if (!(await this.loader.refresh(thread, id))) break;
    }
    for (const response of this.conversations.runningIn(id)) this.streams.follow(thread, response);
    thread.awaitingServer.value = !this.subscribed.value || this.streams.isAwaiting(thread);
  }

  private onUpdated(head: WireConversation, running: readonly string[]): void {
    const { id } = head;
    const thread = this.remote.shown();
    const isShown = thread.id.value === id;
    if (!isShown && running.length === 0 && this.conversations.runningIn(id).length > 0)
      this.conversations.markUnseen(id);
    this.remote.changed(this.conversations.find(id), head);
    this.conversations.upsert(head);
    this.conversations.setRunning(id, running);
    if (!isShown) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => void this.syncThread(this.remote.shown()), DEBOUNCE_MS);
  }
}
