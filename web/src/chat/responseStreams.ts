// Running responses of this connection, started here or elsewhere: assigns frames to turns, ends turns, and resumes
// them after a lost connection.
import type { CreateFrame, ServerFrame, WireResponse } from "../api/frames";
import { call } from "../api/rest";
import type { Socket } from "../api/socket";
import { announce } from "../app/notifications";
import type { ConversationLoader } from "./conversationLoader";
import type { Thread } from "./thread";
import { ENDINGS, type Message } from "./tree";
import { DeltaBatcher, Turn } from "./turn";

const RETRY_MS = 1000; // as the server asks for

export interface ResponseStream {
  readonly thread: Thread;
  readonly turn: Turn;
  readonly above: Message | null; // the message that the turn answers, if it was sent here
  readonly frame: CreateFrame | null; // the request, if it was sent here
  resuming: boolean; // the request or its resume was sent on a new connection and not answered yet
}

/** A response started elsewhere whose resume was requested and not answered yet. */
interface PendingFollow {
  readonly thread: Thread;
  readonly response: string;
}

interface StreamEvents {
  /** The server accepted the request and assigned ids. */
  created(stream: ResponseStream, conversation: string | null): void;
  /** The turn has ended, completed or not. */
  ended(stream: ResponseStream): void;
}

export class ResponseStreams {
  private readonly streams = new Map<string, ResponseStream>(); // by stream_id, which is the key of the turn
  private readonly pendingFollows = new Map<string, PendingFollow>(); // by stream_id
  private readonly batcher = new DeltaBatcher();
  private count = 0;

  constructor(
    private readonly socket: Socket,
    private readonly loader: ConversationLoader,
    private readonly events: StreamEvents,
  ) {}

  /** Send a request and register its stream; one of more than `maxBytes` fails. */
  start(thread: Thread, turn: Turn, above: Message, frame: CreateFrame, maxBytes = Infinity): void {
    thread.addTurn(turn);
    if (new TextEncoder().encode(JSON.stringify(frame)).length > maxBytes) {
      turn.fail(`This message is too long to send (the limit is ${Math.floor(maxBytes / 1024)} KiB).`, this.batcher);
      thread.live.value = this.otherTurn(thread);
      return;
    }
    this.streams.set(turn.key, { thread, turn, above, frame, resuming: false });
    turn.isSubmitted = true;
    const count = turn.candidates.length;
    if (this.socket.send(frame)) announce(count > 1 ? `Generating ${count} answers.` : "Generating.");
    else this.finish(turn.key, "There is no connection to the server.");
  }

  /** Follow a response that another tab started, or this one before a reload. */
  follow(thread: Thread, response: string): void {
    if (thread.turnOfResponse(response)) return; // started here, or stored already
    if (thread.awaitsIds) return; // the response may be that of its turn
    for (const other of this.pendingFollows.values()) if (other.response === response) return;
    const key = `follow-${++this.count}`;
    this.pendingFollows.set(key, { thread, response });
    thread.awaitingServer.value = true;
    this.socket.send({ type: "response.resume", response_id: response, starting_after: -1, stream_id: key });
  }

  /** Whether a followed response of this thread has sent no frame yet. */
  isAwaiting(thread: Thread): boolean {
    for (const other of this.pendingFollows.values()) if (other.thread === thread) return true;
    return false;
  }

  stop(turn: Turn): void {
    turn.stopRequested = true;
    const id = turn.responseId.value;
    if (id !== null) this.sendCancel(turn, id);
  }

  private sendCancel(turn: Turn, response_id: string): void {
    this.socket.send({ type: "response.cancel", response_id, ...(turn.isSteered ? { reason: "steered" } : {}) });
  }

  /** Stop one candidate; the others continue. */
  drop(turn: Turn, message: Message): void {
    const response_id = turn.responseId.value;
    const candidate = turn.candidates.indexOf(message);
    if (response_id !== null) this.socket.send({ type: "response.drop", response_id, candidate });
  }

  /** Handle a frame of one of the streams; false if it belongs to none. */
  receive(frame: ServerFrame): boolean {
    if (frame.stream_id === undefined) return false;
    const followed = this.pendingFollows.get(frame.stream_id);
    if (followed) this.onFirstFrame(frame.stream_id, followed, frame);
    const stream = this.streams.get(frame.stream_id);
    if (!stream) return followed !== undefined;
    const isRefused = stream.resuming && frame.type === "error";
    stream.resuming = false;
    if (isRefused && frame.status === 503 && stream.turn.isUnanswered && !stream.turn.stopRequested) {
      // the server is loading or busy, and may have accepted the request before
      setTimeout(() => !stream.resuming && stream.turn.isUnanswered && this.sendAgain(stream), RETRY_MS);
      return true;
    }
    // `stream`: the request was accepted before, and its events are not available any more
    if (isRefused && (stream.turn.responseId.value !== null || frame.error.param === "stream")) {
      void this.showStored(stream);
      return true;
    }
    stream.turn.apply(frame, this.batcher);
    if (frame.type === "response.created") {
      if (stream.above) stream.above.id.value ??= frame.response.input_item_ids?.at(-1) ?? null;
      this.events.created(stream, frame.response.conversation?.id ?? null);
      if (stream.turn.stopRequested) this.stop(stream.turn);
    }
    if (!stream.turn.live) this.finish(stream.turn.key, null);
    return true;
  }

  /** Resume all streams after the connection was restored. */
  recover(): void {
    for (const [key, { response }] of this.pendingFollows) {
      this.socket.send({ type: "response.resume", response_id: response, starting_after: -1, stream_id: key });
    }
    for (const [key, stream] of [...this.streams]) {
      const response_id = stream.turn.responseId.value;
      if (response_id === null) {
        this.sendAgain(stream);
        continue;
      }
      stream.resuming = true;
      stream.turn.onConnectionLost(this.batcher);
      const starting_after = stream.turn.lastSequence;
      this.socket.send({ type: "response.resume", response_id, starting_after, stream_id: key });
      if (stream.turn.stopRequested) this.sendCancel(stream.turn, response_id);
    }
  }

  private sendAgain(stream: ResponseStream): void {
    stream.resuming = true;
    this.socket.send(stream.frame!); // which the server runs once, by its idempotency key
  }

  private finish(key: string, failure: string | null): void {
    const stream = this.streams.get(key);
    if (!stream) return;
    if (failure !== null) stream.turn.fail(failure, this.batcher);
    this.streams.delete(key);
    if (stream.thread.live.value === stream.turn) stream.thread.live.value = this.otherTurn(stream.thread);
    this.events.ended(stream);
  }

  private otherTurn(thread: Thread): Turn | null {
    for (const stream of this.streams.values()) if (stream.thread === thread) return stream.turn;
    return null;
  }

  /** Add the turn of a followed response to the tree when its first frame arrives. */
  private onFirstFrame(key: string, { thread, response }: PendingFollow, frame: ServerFrame): void {
    if (frame.type === "response.created") {
      const turn = thread.turnOfResponse(response) ? null : followedTurn(thread, key, frame.response);
      if (turn) {
        thread.addTurn(turn);
        this.streams.set(key, { thread, turn, above: null, frame: null, resuming: false });
        announce("An answer is being generated.");
      }
    } else if (frame.type !== "error") return;
    this.pendingFollows.delete(key);
    thread.awaitingServer.value = this.isAwaiting(thread);
  }

  /** The server has no such stream: show what it stored of the answer. */
  private async showStored(stream: ResponseStream): Promise<void> {
    if (stream.turn.responseId.value === null) {
      const headers = { "idempotency-key": stream.frame!.idempotency_key };
      const created = await call<WireResponse>("POST", "v1/responses", stream.frame, { headers }).catch(() => null);
      if (created) this.receive({ type: "response.created", response: created, stream_id: stream.turn.key });
    }
    const id = stream.thread.id.value;
    const response = stream.turn.responseId.value;
    const found = id !== null && response !== null && (await this.loader.waitUntilStored(stream.thread, id, response));
    if (found) stream.turn.markInterrupted();
    this.finish(
      stream.turn.key,
      found ? "Interrupted." : "The connection was lost and the server has no stored answer.",
    );
  }
}

/** Create the turn of a response started elsewhere; null if the message that it answers is not loaded. */
function followedTurn(thread: Thread, key: string, response: WireResponse): Turn | null {
  const tree = thread.tree.value;
  const above = response.parent_item_id ?? response.input_item_ids?.at(-1);
  const parent = above === undefined ? undefined : thread.messageOf(above);
  if (!parent) return null;
  const path = tree.path.value;
  // the shown branch changes only if the user is following it
  const watching = path.at(-1) === parent || (thread.followsActiveLeaf && path.includes(parent));
  const candidates = Array.from({ length: Math.max(1, response.n ?? 1) }, (_, index) =>
    tree.add(
      { key: `${key}-${index}`, parent: parent.key, role: "assistant", turn: key, status: "waiting" },
      watching && index === 0,
    ),
  );
  return new Turn(key, candidates, response.beam_width !== undefined);
}

/** Announcement for screen readers at the end of a turn. */
export function describeEnding(turn: Turn): string {
  const [first] = turn.candidates;
  const words = first?.text.value.split(/\s+/).filter(Boolean).length ?? 0;
  if (first?.status.value === "error") return `The answer failed. ${first.error.value}`;
  if (turn.candidates.length > 1) return `${turn.candidates.length} answers complete.`;
  const ending = first && ENDINGS[first.status.value];
  return ending ?? `Answer complete, ${words} words.`;
}
