// What happens to conversations elsewhere: other tabs, other devices, a model that goes on while this page was away.
// The shown conversation is kept as the server has it, and whatever is being written in it is read along.

import { signal } from "@preact/signals";
import type { ServerFrame, WireConversation } from "../api/frames";
import type { Socket } from "../api/socket";
import type { Conversations } from "../conversations/conversations";
import type { ConversationLoader } from "./conversationLoader";
import type { ResponseStreams } from "./responseStreams";
import type { Thread } from "./thread";

const DEBOUNCE_MS = 50; // the same change reaches us by two ways: what was ours is known by then

const MAX_ATTEMPTS = 3; // it changes while it is read; the next notice brings the rest

export interface RemoteChanges {
  readonly shown: () => Thread;
  /** Others changed a conversation: as it was known, and as it is. */
  readonly changed: (before: WireConversation | undefined, now: WireConversation) => void;
  readonly deleted: (id: string) => void;
}

export class LiveSync {
  readonly subscribed = signal(false);
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly socket: Socket,
    private readonly conversations: Conversations,
    private readonly keeper: ConversationLoader,
    private readonly lanes: ResponseStreams,
    private readonly remote: RemoteChanges,
  ) {
    socket.state.subscribe((state) => {
      if (state !== "open") this.subscribed.value = false;
    });
  }

  /** A new connection: hear of everything from here on. */
  subscribe(): void {
    this.socket.send({ type: "conversation.subscribe" });
  }

  /** Take a frame of the subscription. */
  receive(frame: ServerFrame): void {
    if (frame.type === "conversation.subscribed") {
      this.conversations.setAllRunning(frame.running);
      this.subscribed.value = true;
      void this.refreshThread(this.remote.shown());
    } else if (frame.type === "conversation.updated" && frame.running) {
      this.onUpdated(frame.conversation, frame.running);
    } else if (frame.type === "conversation.deleted") {
      this.conversations.removeLocal(frame.conversation_id);
      this.remote.deleted(frame.conversation_id);
    } else if (frame.type === "conversation.missed") {
      void this.conversations.refresh();
      void this.refreshThread(this.remote.shown());
    }
  }

  /** Whatever was missed while nobody told us: read it now. Call it for every thread that comes into view. */
  async refreshThread(thread: Thread): Promise<void> {
    const id = thread.id.value;
    if (id === null || !this.subscribed.value || thread.state.value !== "ready") return;
    await this.keeper.loadHead(id);
    await this.syncThread(thread);
  }

  /** Read what is new in a thread, and read along what is being written there. */
  async syncThread(thread: Thread): Promise<void> {
    const id = thread.id.value;
    if (id === null || thread.state.value !== "ready") return;
    await this.conversations.waitForOwnChanges();
    for (
      let tries = 0;
      tries < MAX_ATTEMPTS && thread.staleCheck.isStale(this.conversations.find(id)?.rev ?? 0);
      tries++
    ) {
      if (!(await this.keeper.refresh(thread, id))) break;
    }
    for (const response of this.conversations.runningIn(id)) this.lanes.follow(thread, response);
    thread.awaitingServer.value = !this.subscribed.value || this.lanes.isAwaiting(thread);
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
