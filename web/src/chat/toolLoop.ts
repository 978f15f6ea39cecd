// Runs the tools that an answer calls, and lets the answer continue when all calls have a result. Loaded when an answer
// calls a tool.

import type { WireCall } from "../api/frames";
import { callMcpTool } from "../api/mcp";
import { RequestError } from "../api/rest";
import { load, save } from "../app/browser";
import { plural } from "../app/format";
import { announce, toast } from "../app/notifications";
import type { Sampling } from "../app/settings";
import type { ConversationLoader } from "./conversationLoader";
import type { AnswerOptions } from "./request";
import type { Thread } from "./thread";
import type { ToolServers } from "./toolServers";
import type { CallOutput, CallRun, Message } from "./tree";

export const MAX_ROUNDS = 16; // answers that continue one after another without a click of the user
const DECLINED = "The user declined this call.";

/** The part of the chat that the loop uses. */
export interface ToolHost {
  readonly toolServers: ToolServers;
  readonly loader: Pick<ConversationLoader, "loadId">;
  generate(thread: Thread, above: Message, only: Partial<Sampling>, options: AnswerOptions): void;
}

export const toolName = ({ namespace, name }: WireCall) => [namespace, name].filter(Boolean).join(".");

/** An answer of this page has ended with calls: run those that need no confirmation. */
export function startCalls(host: ToolHost, thread: Thread, answer: Message): void {
  const isBounded = roundsBefore(thread, answer) < MAX_ROUNDS;
  let waiting = 0;
  for (const call of answer.calls.value) {
    const tool = host.toolServers.find(call);
    if (tool === undefined) continue;
    const confirmed = thread.allowedTools.has(toolName(call));
    if (isBounded && (confirmed || !tool.needs_confirmation)) void runCall(host, thread, answer, call, confirmed);
    else waiting++;
  }
  if (waiting > 0) announce(`${plural(waiting, "tool call")} to confirm.`);
  else if (isBounded) void continueAnswer(host, thread, answer);
}

/** Run one call. `confirmed`: by the user; otherwise the operator must allow the tool. */
export async function runCall(
  host: ToolHost,
  thread: Thread,
  answer: Message,
  call: WireCall,
  confirmed: boolean,
): Promise<void> {
  const abort = new AbortController();
  setRun(answer, call, { phase: "running", stop: () => abort.abort() });
  const request = { server: call.namespace ?? "", tool: call.name, arguments: call.arguments, confirmed };
  try {
    const { output, is_error, seconds } = await callMcpTool(request, abort.signal);
    setRun(answer, call, { phase: "done", output, isError: is_error, seconds });
  } catch (error) {
    const needsUser = error instanceof RequestError && error.code === "confirmation_required"; // changed by the operator
    if (needsUser) void host.toolServers.load().catch(() => {});
    if (needsUser || abort.signal.aborted) {
      setRun(answer, call, null);
      return;
    }
    setRun(answer, call, { phase: "done", output: `Error: ${(error as Error).message}`, isError: true, seconds: null });
  }
  await continueAnswer(host, thread, answer);
}

/** Allow a tool for as long as the page is open, and run the calls of it that wait. */
export function allowTool(host: ToolHost, thread: Thread, answer: Message, call: WireCall): void {
  thread.allowedTools.add(toolName(call));
  for (const other of answer.calls.value) {
    const isSame = toolName(other) === toolName(call);
    if (isSame && !answer.callRuns.value.has(other.call_id)) void runCall(host, thread, answer, other, true);
  }
}

export function declineCall(host: ToolHost, thread: Thread, answer: Message, call: WireCall): void {
  setRun(answer, call, { phase: "done", output: DECLINED, isError: false, seconds: null });
  void continueAnswer(host, thread, answer);
}

/** Send the results of all calls, if each has one and nothing follows the answer. */
export async function continueAnswer(host: ToolHost, thread: Thread, answer: Message): Promise<void> {
  const outputs = answer.calls.value.flatMap((call) => outputOf(host, answer, call) ?? []);
  if (outputs.length < answer.calls.value.length || !isLast(thread, answer)) return;
  await host.loader.loadId(thread, answer);
  if (answer.id.value === null) {
    toast("The results cannot be sent: the server has not stored the calls.");
    return;
  }
  if (!isLast(thread, answer)) return;
  const turn = thread.turnOf(answer);
  if (turn && turn.candidates.length > 1) {
    turn.showsCandidates.value = false; // continuing counts as picking
    thread.tree.value.choose(answer);
  }
  const sent = turn?.sent;
  const options = { outputs, ...(sent ? { instructions: sent.instructions } : {}) };
  host.generate(thread, answer, { ...sent?.settings, n: 1, search: "sample" }, options);
}

function outputOf({ toolServers }: ToolHost, answer: Message, call: WireCall): CallOutput | null {
  const run = answer.callRuns.value.get(call.call_id);
  if (run?.phase === "done") return { callId: call.call_id, text: run.output };
  if (run || toolServers.find(call)) return null;
  return { callId: call.call_id, text: `Error: there is no tool ${toolName(call)}.` };
}

function setRun(answer: Message, call: WireCall, run: CallRun | null): void {
  if (run?.phase === "done") keepEnding(call.call_id, run);
  const runs = new Map(answer.callRuns.value);
  if (run === null) runs.delete(call.call_id);
  else runs.set(call.call_id, run);
  answer.callRuns.value = runs;
}

// -- How calls ended, which the server does not store: kept in this browser

type Ending = Pick<CallRun & { phase: "done" }, "isError" | "seconds">;

const MAX_KEPT_ENDINGS = 200;
const keptEndings = () => load<Readonly<Record<string, Ending>>>("toolRuns", {});

function keepEnding(callId: string, { isError, seconds }: Ending): void {
  const { [callId]: _, ...others } = keptEndings();
  const kept = Object.entries({ ...others, [callId]: { isError, seconds } });
  save("toolRuns", Object.fromEntries(kept.slice(-MAX_KEPT_ENDINGS)));
}

/** How a call ended that this page, or an earlier one of this browser, has run. */
export function endingOf(callId: string, run: CallRun | undefined): Ending | undefined {
  return run?.phase === "done" ? run : keptEndings()[callId];
}

/** Whether nothing follows the answer, and no other answer of the conversation is running. */
function isLast({ tree, live }: Thread, answer: Message): boolean {
  return live.value === null && tree.value.childrenOf(answer.key).length === 0;
}

/** Number of answers above this one that it continues, up to the user's message. */
function roundsBefore({ tree }: Thread, answer: Message): number {
  let rounds = 0;
  for (let at: Message | undefined = answer; at && at.callOutputs.value.length > 0; rounds++)
    at = at.parent === null ? undefined : tree.value.get(at.parent);
  return rounds;
}
