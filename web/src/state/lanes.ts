// Responses under way on this connection: which frames belong to which turn, how a turn ends, and how it goes on after
// the connection was lost.
import type { CreateFrame, ServerFrame } from "../wire/frames";
import type { Socket } from "../wire/socket";
import { announce } from "./announcer";
import { FrameBatcher } from "./frame";
import type { Keeper } from "./keeper";
import type { Thread } from "./thread";
import type { Message } from "./tree";
import type { Turn } from "./turn";

export interface Lane {
  readonly thread: Thread;
  readonly turn: Turn;
  readonly user: Message; // what the turn answers
  resuming: boolean; // asked to go on after a lost connection, not answered yet
}

export interface LaneEvents {
  /** The server has taken it and given names; `conversation` is where it belongs. */
  created(lane: Lane, conversation: string | null): void;
  /** The turn is over, one way or the other. */
  settled(lane: Lane): void;
}

export class Lanes {
  private readonly lanes = new Map<string, Lane>(); // by stream_id, which is the turn's key
  private readonly batcher = new FrameBatcher();

  constructor(
    private readonly socket: Socket,
    private readonly keeper: Keeper,
    private readonly events: LaneEvents,
  ) {}

  /** Ask for a response; its frames become the turn's. */
  begin(thread: Thread, turn: Turn, user: Message, frame: CreateFrame): void {
    thread.addTurn(turn);
    this.lanes.set(turn.key, { thread, turn, user, resuming: false });
    const count = turn.candidates.length;
    if (this.socket.send(frame)) announce(count > 1 ? `Generating ${count} answers.` : "Generating.");
    else this.settle(turn.key, "There is no connection to the server.");
  }

  /** End a turn that was never sent. */
  refuse(turn: Turn, reason: string): void {
    turn.fail(reason, this.batcher);
  }

  stop(turn: Turn): void {
    turn.stopWanted = true;
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
    const lane = frame.stream_id === undefined ? undefined : this.lanes.get(frame.stream_id);
    if (!lane) return false;
    const lost = lane.resuming && frame.type === "error";
    lane.resuming = false;
    if (lost) {
      void this.showKept(lane);
      return true;
    }
    lane.turn.apply(frame, this.batcher);
    if (frame.type === "response.created") {
      lane.user.id.value ??= frame.response.input_item_ids?.at(-1) ?? null;
      this.events.created(lane, frame.response.conversation?.id ?? null);
      if (lane.turn.stopWanted) this.stop(lane.turn);
    }
    if (!lane.turn.live) this.settle(lane.turn.key, null);
    return true;
  }

  /** The connection is back. What was running went on without us: read on where we were. */
  recover(): void {
    for (const [key, lane] of [...this.lanes]) {
      const response_id = lane.turn.responseId.value;
      if (response_id === null) {
        this.settle(key, "The connection was lost before this was sent.");
        continue;
      }
      lane.resuming = true;
      const starting_after = lane.turn.lastNumber;
      this.socket.send({ type: "response.resume", response_id, starting_after, stream_id: key });
      if (lane.turn.stopWanted) this.socket.send({ type: "response.cancel", response_id });
    }
  }

  private settle(key: string, failure: string | null): void {
    const lane = this.lanes.get(key);
    if (!lane) return;
    if (failure !== null) lane.turn.fail(failure, this.batcher);
    this.lanes.delete(key);
    lane.thread.live.value = null;
    announce(ending(lane.turn));
    this.events.settled(lane);
  }

  /** The server knows the stream no more: show what it kept of the answer. */
  private async showKept(lane: Lane): Promise<void> {
    const id = lane.thread.id.value;
    const response = lane.turn.responseId.value;
    const found = id !== null && response !== null && (await this.keeper.catchUp(lane.thread, id, response));
    this.settle(lane.turn.key, found ? "Interrupted." : "The connection was lost and the server kept no answer.");
  }
}

/** What a screen reader is told at the end of a turn. */
function ending(turn: Turn): string {
  const [first] = turn.candidates;
  const words = first?.text.value.split(/\s+/).filter(Boolean).length ?? 0;
  if (first?.status.value === "error") return `The answer failed. ${first.error.value}`;
  if (turn.candidates.length > 1) return `${turn.candidates.length} answers complete.`;
  return first?.status.value === "stopped" ? "Stopped." : `Answer complete, ${words} words.`;
}
