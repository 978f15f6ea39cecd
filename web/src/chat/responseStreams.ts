// Responses under way on this connection, whoever asked for them: which frames belong to which turn, how a turn ends, and
// how it goes on after the connection was lost.
import type { CreateFrame, ServerFrame, WireResponse } from "../api/frames";
import type { Socket } from "../api/socket";
import { announce } from "../app/notifications";
import type { ConversationLoader } from "./conversationLoader";
import type { Thread } from "./thread";
import type { Message } from "./tree";
import { DeltaBatcher, Turn } from "./turn";

export interface ResponseStream {
  readonly thread: Thread;
  readonly turn: Turn;
  readonly user: Message | null; // what the turn answers, where this page said it
  resuming: boolean; // asked to go on after a lost connection, not answered yet
}

/** A response that somebody else began, asked for and not heard of yet. */
interface PendingFollow {
  readonly thread: Thread;
  readonly response: string;
}

export interface StreamEvents {
  /** The server has taken it and given names; `conversation` is where it belongs. */
  created(lane: ResponseStream, conversation: string | null): void;
  /** The turn is over, one way or the other. */
  ended(lane: ResponseStream): void;
}

export class ResponseStreams {
  private readonly streams = new Map<string, ResponseStream>(); // by stream_id, which is the turn's key
  private readonly pendingFollows = new Map<string, PendingFollow>(); // by stream_id
  private readonly batcher = new DeltaBatcher();
  private count = 0;

  constructor(
    private readonly socket: Socket,
    private readonly keeper: ConversationLoader,
    private readonly events: StreamEvents,
  ) {}

  /** Ask for a response; its frames become the turn's. */
  start(thread: Thread, turn: Turn, user: Message, frame: CreateFrame): void {
    thread.addTurn(turn);
    this.streams.set(turn.key, { thread, turn, user, resuming: false });
    const count = turn.candidates.length;
    if (this.socket.send(frame)) announce(count > 1 ? `Generating ${count} answers.` : "Generating.");
    else this.finish(turn.key, "There is no connection to the server.");
  }

  /** Show a response that runs in this thread, begun by another tab or before a reload. */
  follow(thread: Thread, response: string): void {
    if (thread.turnOfResponse(response)) return; // ours, or stored by now
    for (const lane of this.streams.values()) {
      if (lane.thread === thread && lane.turn.responseId.value === null) return; // may be this very one
    }
    for (const other of this.pendingFollows.values()) if (other.response === response) return;
    const key = `follow-${++this.count}`;
    this.pendingFollows.set(key, { thread, response });
    thread.awaitingServer.value = true;
    this.socket.send({ type: "response.resume", response_id: response, starting_after: -1, stream_id: key });
  }

  /** Whether a followed response of this thread has not shown itself yet. */
  isAwaiting(thread: Thread): boolean {
    for (const other of this.pendingFollows.values()) if (other.thread === thread) return true;
    return false;
  }

  /** End a turn that was never sent. */
  reject(turn: Turn, reason: string): void {
    turn.fail(reason, this.batcher);
  }

  stop(turn: Turn): void {
    turn.stopRequested = true;
    const id = turn.responseId.value;
    if (id !== null) this.socket.send({ type: "response.cancel", response_id: id });
  }

  /** End one candidate; the others go on. */
  drop(turn: Turn, message: Message): void {
    const response_id = turn.responseId.value;
    const candidate = turn.candidates.indexOf(message);
    if (response_id !== null) this.socket.send({ type: "response.drop", response_id, candidate });
  }

  /** Take a frame of one of the lanes; false if it is of none. */
  receive(frame: ServerFrame): boolean {
    if (frame.stream_id === undefined) return false;
    const followed = this.pendingFollows.get(frame.stream_id);
    if (followed) this.onFirstFrame(frame.stream_id, followed, frame);
    const lane = this.streams.get(frame.stream_id);
    if (!lane) return followed !== undefined;
    const lost = lane.resuming && frame.type === "error";
    lane.resuming = false;
    if (lost) {
      void this.showStored(lane);
      return true;
    }
    lane.turn.apply(frame, this.batcher);
    if (frame.type === "response.created") {
      if (lane.user) lane.user.id.value ??= frame.response.input_item_ids?.at(-1) ?? null;
      this.events.created(lane, frame.response.conversation?.id ?? null);
      if (lane.turn.stopRequested) this.stop(lane.turn);
    }
    if (!lane.turn.live) this.finish(lane.turn.key, null);
    return true;
  }

  /** The connection is back. What was running went on without us: read on where we were. */
  recover(): void {
    for (const [key, { response }] of this.pendingFollows) {
      this.socket.send({ type: "response.resume", response_id: response, starting_after: -1, stream_id: key });
    }
    for (const [key, lane] of [...this.streams]) {
      const response_id = lane.turn.responseId.value;
      if (response_id === null) {
        this.finish(key, "The connection was lost before this was sent.");
        continue;
      }
      lane.resuming = true;
      const starting_after = lane.turn.lastSequence;
      this.socket.send({ type: "response.resume", response_id, starting_after, stream_id: key });
      if (lane.turn.stopRequested) this.socket.send({ type: "response.cancel", response_id });
    }
  }

  private finish(key: string, failure: string | null): void {
    const lane = this.streams.get(key);
    if (!lane) return;
    if (failure !== null) lane.turn.fail(failure, this.batcher);
    this.streams.delete(key);
    if (lane.thread.live.value === lane.turn) lane.thread.live.value = this.otherTurn(lane.thread);
    this.events.ended(lane);
  }

  private otherTurn(thread: Thread): Turn | null {
    for (const lane of this.streams.values()) if (lane.thread === thread) return lane.turn;
    return null;
  }

  /** The first frames of a followed response: it gets its place in the tree. */
  private onFirstFrame(key: string, { thread, response }: PendingFollow, frame: ServerFrame): void {
    if (frame.type === "response.created") {
      const turn = thread.turnOfResponse(response) ? null : followedTurn(thread, key, frame.response);
      if (turn) {
        thread.addTurn(turn);
        this.streams.set(key, { thread, turn, user: null, resuming: false });
        announce("An answer is being written.");
      }
    } else if (frame.type !== "error") return;
    this.pendingFollows.delete(key);
    thread.awaitingServer.value = this.isAwaiting(thread);
  }

  /** The server knows the stream no more: show what it kept of the answer. */
  private async showStored(lane: ResponseStream): Promise<void> {
    const id = lane.thread.id.value;
    const response = lane.turn.responseId.value;
    const found = id !== null && response !== null && (await this.keeper.waitUntilStored(lane.thread, id, response));
    this.finish(lane.turn.key, found ? "Interrupted." : "The connection was lost and the server kept no answer.");
  }
}

/** The candidates of a response that others began, below the message that it answers; null if that is not here. */
function followedTurn(thread: Thread, key: string, response: WireResponse): Turn | null {
  const tree = thread.tree.value;
  const above = response.parent_item_id ?? response.input_item_ids?.at(-1);
  const parent = above === undefined ? undefined : tree.byId(above);
  if (!parent) return null;
  const path = tree.path.value;
  const watching = path.at(-1) === parent || (thread.followsActiveLeaf && path.includes(parent)); // others are not moved
  const candidates = Array.from({ length: Math.max(1, response.n ?? 1) }, (_, index) =>
    tree.add(
      { key: `${key}-${index}`, parent: parent.key, role: "assistant", turn: key, status: "waiting" },
      watching && index === 0,
    ),
  );
  return new Turn(key, candidates, response.beam_width !== undefined, null, true);
}

/** What a screen reader is told at the end of a turn. */
export function describeEnding(turn: Turn): string {
  const [first] = turn.candidates;
  const words = first?.text.value.split(/\s+/).filter(Boolean).length ?? 0;
  if (first?.status.value === "error") return `The answer failed. ${first.error.value}`;
  if (turn.candidates.length > 1) return `${turn.candidates.length} answers complete.`;
  return first?.status.value === "stopped" ? "Stopped." : `Answer complete, ${words} words.`;
}
