// One request and its result: candidates, statistics, and how frames change them.

import { batch, computed, type Signal, signal } from "@preact/signals";
import type {
  CacheMiss,
  ServerFrame,
  StopReceipt,
  WireCall,
  WireItem,
  WireOutput,
  WireResponse,
  WireStatistics,
  WireUsage,
} from "../api/frames";
import type { Sampling } from "../app/settings";
import { type AnswerSettings, settingsOf } from "./answerSettings";
import { BeamTree } from "./beamTree";
import type { Message, Status, Usage } from "./tree";

type Phase = "queued" | "prefill" | "decode" | "ended";

/** Start of a turn inside an answer: its first `keepTokens` tokens, then optionally another token. */
export interface ForkStart {
  readonly item: string;
  readonly keepTokens: number;
  readonly token: { readonly id: number; readonly text: string } | null; // null: the model samples the next token
  readonly inspectedPages: number | null; // pages copied for the alternatives, which the fork reuses; null: unknown
}

const STATUS_OF_REASON: Readonly<Record<string, Status>> = { stop: "done", length: "length", cancelled: "stopped" };

const STATUS_OF_INCOMPLETE: Readonly<Record<string, Status>> = { max_output_tokens: "length", steered: "steered" };

function statusOfIncomplete({ status, incomplete_details }: WireResponse): Status {
  return status === "cancelled" ? "stopped" : (STATUS_OF_INCOMPLETE[incomplete_details?.reason ?? ""] ?? "interrupted");
}

const MIN_DECODE_MS = 200; // deltas arrive in bursts: over a shorter time the speed is meaningless

export class Turn {
  readonly responseId = signal<string | null>(null);
  readonly phase = signal<Phase>("queued");
  readonly usage = signal<Usage | null>(null);
  readonly receipt = signal<StopReceipt | null>(null);
  readonly miss = signal<CacheMiss | null>(null); // why the prompt was not fully cached
  readonly copiedPages = signal<number | null>(null); // pages copied on write
  readonly dropped = signal<ReadonlyMap<Message, StopReceipt>>(new Map());
  readonly firstTokenMs = signal<number | null>(null); // from the request, measured by the server
  readonly decodeMs = signal<number | null>(null); // from the first token to the end
  readonly unsaved = signal(false); // the store was unavailable at the end; the server retries
  readonly showsCandidates = signal(true); // candidates are shown side by side until one is picked
  readonly beamTree = signal<BeamTree | null>(null); // set by the first beam frame
  readonly settings = signal<AnswerSettings | null>(null); // null: not loaded
  settingsLoad: Promise<void> | null = null; // in progress
  /** Settings of the request; null if this page did not send it. */
  sent: { readonly settings: Sampling; readonly instructions: string } | null = null;
  isSubmitted = false; // the request was sent
  stopRequested = false;
  isTooLong = false; // the prompt does not fit the context: the same request would be refused again
  isSteered = false; // stopped in order to go on with another message
  private readonly candidateByOutput = new Map<number, number>(); // output_index of a message -> candidate
  private readonly reasoningByOutput = new Map<number, number>(); // output_index of reasoning -> candidate
  lastSequence = -1; // sequence_number of the newest frame received
  private textsAtLoss: readonly string[] = [];

  readonly tokensPerSecond = computed<number | null>(() => {
    // the first token of each candidate belongs to the prefill
    const tokens = (this.usage.value?.outputTokens ?? 0) - this.candidates.length;
    const ms = this.decodeMs.value;
    return ms !== null && ms > MIN_DECODE_MS && tokens > 0 ? (tokens / ms) * 1000 : null;
  });

  constructor(
    readonly key: string,
    readonly candidates: readonly Message[],
    readonly beams = false,
    readonly start: ForkStart | null = null,
  ) {}

  get live(): boolean {
    return this.phase.value !== "ended";
  }

  /** Whether the server has not answered the request yet: it may have stored messages whose ids are unknown here. */
  get isUnanswered(): boolean {
    return this.isSubmitted && this.live && this.responseId.value === null;
  }

  /** Whether the candidate is running and can be stopped alone. Beams compete and cannot. */
  canDrop(message: Message): boolean {
    const open = message.status.value === "waiting" || message.status.value === "streaming";
    return (
      this.live &&
      this.responseId.value !== null &&
      open &&
      !this.beams &&
      this.candidates.length > 1 &&
      !this.dropped.value.has(message)
    );
  }

  /** Note that the answers were stopped by the next message. */
  markSteered(): void {
    for (const { status } of this.candidates) if (status.value === "stopped") status.value = "steered";
  }

  /** Take the figures of a response that has ended. */
  restore(figures: WireStatistics): void {
    this.firstTokenMs.value = figures.first_token_ms;
    this.decodeMs.value = figures.decode_ms;
    this.copiedPages.value = figures.copied_pages;
    this.miss.value = figures.miss;
    this.receipt.value = figures.receipt;
  }

  get failed(): boolean {
    return this.candidates.some((message) => message.status.value === "error");
  }

  /** The answer that ended with calls of tools for this page to run; null if there is none, or the user has to pick. */
  get callingAnswer(): Message | null {
    const [answer, ...others] = this.candidates;
    const isCalling = answer !== undefined && answer.status.value === "done" && answer.calls.value.length > 0;
    const isOwn = this.sent !== null && this.sent.settings.toolServers.length > 0 && !this.stopRequested;
    return isCalling && isOwn && others.length === 0 ? answer : null;
  }

  /** Apply one frame of this turn's stream. */
  apply(frame: ServerFrame, batcher: DeltaBatcher): void {
    if (frame.type === "response.resumed") return; // its number is the newest one of the server, not of this page
    this.lastSequence = Math.max(this.lastSequence, frame.sequence_number ?? -1);
    switch (frame.type) {
      case "response.created":
        this.responseId.value = frame.response.id;
        this.settings.value = settingsOf(frame.response);
        break;
      case "response.progress":
        this.updateProgress(frame.phase, frame.input_tokens, frame.cached_tokens);
        if (frame.phase !== "decode") break;
        this.miss.value = frame.miss ?? null;
        this.copiedPages.value = frame.copied_pages ?? null;
        break;
      case "response.beam":
        this.phase.value = "decode";
        this.beamTree.value ??= new BeamTree();
        this.beamTree.value.grow(frame.nodes, frame.live);
        break;
      case "response.output_item.added":
        if (frame.item.type === "reasoning") this.beginReasoning(frame.output_index, frame.item.candidate);
        if ((frame.item.type ?? "message") !== "message") break;
        this.candidateByOutput.set(frame.output_index, frame.item.candidate ?? frame.output_index);
        this.update(frame.output_index, frame.item, "streaming");
        break;
      case "response.output_text.delta": {
        const message = this.messageAt(frame.output_index);
        if (message) batcher.append(message.text, frame.delta);
        break;
      }
      case "response.output_text.done": {
        batcher.flush();
        const message = this.messageAt(frame.output_index);
        if (message && message.text.value !== frame.text) message.text.value = frame.text;
        break;
      }
      case "response.reasoning_text.delta":
        batcher.append(this.reasoningAt(frame.output_index), frame.delta);
        break;
      case "response.reasoning_text.done":
        batcher.flush();
        this.reasoningAt(frame.output_index).value = frame.text;
        break;
      case "response.dropped": {
        const message = this.candidates[frame.candidate];
        if (message) this.dropped.value = new Map([...this.dropped.value, [message, frame.receipt]]);
        break;
      }
      case "response.snapshot":
        this.applySnapshot(frame.outputs, batcher);
        break;
      case "response.output_item.done":
        if ("call_id" in frame.item) this.addCall(frame.item);
        if ((frame.item.type ?? "message") !== "message") break;
        this.update(frame.output_index, frame.item, STATUS_OF_REASON[frame.item.finish_reason ?? "stop"] ?? "done");
        break;
      case "response.completed":
        this.unsaved.value = frame.saved === false;
        this.end(frame.response, frame.statistics, "done", batcher);
        break;
      case "response.incomplete":
        this.unsaved.value = frame.saved === false;
        this.end(frame.response, frame.statistics, statusOfIncomplete(frame.response), batcher);
        break;
      case "response.failed":
        this.unsaved.value = frame.saved === false;
        this.fail(frame.response.error?.message ?? "The answer failed.", batcher);
        break;
      case "error":
        this.isTooLong = frame.error.code === "context_length_exceeded";
        this.fail(frame.error.message, batcher);
        break;
      default:
        break;
    }
  }

  private applySnapshot(outputs: readonly WireOutput[], batcher: DeltaBatcher): void {
    batcher.flush();
    for (const output of outputs) {
      if (output.type === "reasoning") {
        this.beginReasoning(output.output_index, output.candidate);
        this.reasoningAt(output.output_index).value = output.text ?? "";
      }
      if (isCall(output)) this.addCall(output);
      if (output.type !== "message") continue;
      this.candidateByOutput.set(output.output_index, output.candidate ?? output.output_index);
      const message = this.messageAt(output.output_index);
      if (!message) continue;
      if (message.status.value === "waiting") this.update(output.output_index, { id: output.item_id }, "streaming");
      message.text.value = output.text ?? "";
    }
  }

  fail(reason: string, batcher: DeltaBatcher): void {
    batcher.flush();
    batch(() => {
      for (const message of this.candidates) {
        if (message.status.value !== "waiting" && message.status.value !== "streaming") continue;
        message.status.value = "error";
        message.error.value = reason;
        message.id.value = null; // the server may not have stored it, and refuses requests that name it
      }
      this.phase.value = "ended";
    });
  }

  /** Remember what is shown: if the server was killed, it may have stored less. */
  onConnectionLost(batcher: DeltaBatcher): void {
    batcher.flush();
    this.textsAtLoss = this.candidates.map((message) => message.text.value);
  }

  /** The server stored the answers, but did not end them: it was killed or stopped. */
  markInterrupted(): void {
    for (const [index, message] of this.candidates.entries()) {
      if (!["stopped", "interrupted"].includes(message.status.value) || this.stopRequested) continue;
      message.status.value = "interrupted";
      const [shown, stored] = [this.textsAtLoss[index] ?? "", message.text.value];
      if (shown.length <= stored.length || !shown.startsWith(stored)) continue;
      message.text.value = shown;
      message.error.value = "The server did not store the last words.";
    }
  }

  private updateProgress(phase: "queued" | "decode", input: number | null, cached: number | null): void {
    this.phase.value = phase === "decode" ? "decode" : "prefill";
    if (input === null || cached === null) return;
    this.usage.value = { inputTokens: input, cachedTokens: cached, outputTokens: this.usage.value?.outputTokens ?? 0 };
  }

  private messageAt(index: number): Message | undefined {
    return this.candidates[this.candidateByOutput.get(index) ?? index];
  }

  private beginReasoning(index: number, candidate = 0): void {
    this.reasoningByOutput.set(index, candidate);
    this.phase.value = "decode";
  }

  /** Add a call, or replace it by what is known of it now. */
  private addCall(call: WireCall): void {
    const calls = this.candidates[call.candidate]?.calls;
    if (calls) calls.value = [...calls.value.filter(({ call_id }) => call_id !== call.call_id), call];
  }

  private reasoningAt(index: number): Signal<string> {
    return this.candidates[this.reasoningByOutput.get(index) ?? 0]!.reasoning;
  }

  private update(index: number, item: WireItem, status: Status): void {
    const message = this.messageAt(index);
    if (!message) return;
    message.id.value = item.id;
    message.status.value = status;
    this.phase.value = "decode";
  }

  private end(
    response: WireResponse,
    figures: WireStatistics | undefined,
    fallback: Status,
    batcher: DeltaBatcher,
  ): void {
    batcher.flush();
    batch(() => {
      if (figures) this.restore(figures);
      for (const message of this.candidates) {
        const open = message.status.value === "waiting" || message.status.value === "streaming";
        if (open) message.status.value = fallback;
      }
      if (response.usage) this.usage.value = toUsage(response.usage);
      this.phase.value = "ended";
    });
  }
}

function isCall(output: WireOutput): output is WireOutput & WireCall {
  return output.type === "function_call";
}

export function toUsage(usage: WireUsage): Usage {
  return {
    inputTokens: usage.input_tokens,
    cachedTokens: usage.input_tokens_details?.cached_tokens ?? 0,
    outputTokens: usage.output_tokens,
    ...(usage.output_tokens_details?.reasoning_tokens
      ? { reasoningTokens: usage.output_tokens_details.reasoning_tokens }
      : {}),
  };
}

// -- Delta batching: deltas arrive faster than frames are drawn, so they are applied once per animation frame

const HIDDEN_TAB_MS = 250; // hidden tabs get no animation frames

export class DeltaBatcher {
  private readonly pending = new Map<Signal<string>, string>();
  private scheduled = false;

  append(text: Signal<string>, delta: string): void {
    this.pending.set(text, (this.pending.get(text) ?? "") + delta);
    if (this.scheduled) return;
    this.scheduled = true;
    if (document.hidden) setTimeout(() => this.flush(), HIDDEN_TAB_MS);
    else requestAnimationFrame(() => this.flush());
  }

  flush(): void {
    this.scheduled = false;
    batch(() => {
      for (const [text, delta] of this.pending) text.value += delta;
      this.pending.clear();
    });
  }
}
