// Function calls of an answer as cards: name, arguments, and the result of the shown branch. A call of an MCP server's
// tool that has no result waits here for the user.

import type { ComponentChildren } from "preact";
import { useEffect } from "preact/hooks";
import type { WireCall } from "../../api/frames";
import { truncate } from "../../app/format";
import { allowTool, continueAnswer, declineCall, endingOf, runCall, toolName } from "../../chat/toolLoop";
import type { CallRun, Message } from "../../chat/tree";
import { useChat } from "../context";
import { CopyButton } from "./MessageParts";
import "./tool-calls.css";

const SUMMARY_CHARS = 80;

export function ToolCalls({ message }: { message: Message }) {
  const chat = useChat();
  const thread = chat.thread.value;
  const tree = thread.tree.value;
  void tree.path.value;
  const next = tree.chosenChild(message.key);
  const isOpen = next === undefined && message.status.value === "done" && thread.live.value === null;
  const calls = message.calls.value;
  const runs = message.callRuns.value;
  const servers = [...new Set(calls.flatMap(({ namespace }) => namespace ?? []))].join();
  useEffect(() => {
    if (isOpen && servers !== "") void chat.toolServers.prepare(servers.split(","));
  }, [isOpen, servers]);
  return (
    <>
      {calls.map((call) => {
        const output = next?.callOutputs.value.find(({ callId }) => callId === call.call_id)?.text;
        const run = runs.get(call.call_id);
        const waits = isOpen && !run && chat.toolServers.find(call) !== undefined;
        return (
          <ToolCall key={call.call_id} call={call} output={output} run={run}>
            {waits && <Confirmation message={message} call={call} />}
          </ToolCall>
        );
      })}
      {isOpen && calls.every(({ call_id }) => runs.get(call_id)?.phase === "done") && (
        <button type="button" class="button" onClick={() => void continueAnswer(chat, thread, message)}>
          Continue
        </button>
      )}
    </>
  );
}

interface CallProps {
  readonly call: WireCall;
  readonly output: string | undefined; // on the shown branch
  readonly run: CallRun | undefined;
  readonly children: ComponentChildren; // buttons, while the call waits for the user
}

function ToolCall({ call, output, run, children }: CallProps) {
  const name = toolName(call);
  const sent = indentJson(call.arguments);
  const result = output ?? (run?.phase === "done" ? run.output : undefined);
  return (
    <details class="tool-call" open={Boolean(children) || run?.phase === "running"}>
      <summary>
        <b>{name}</b> <code>{truncate(call.arguments, SUMMARY_CHARS)}</code>
        <span class="hint">{children ? "not run yet" : describe(call, run, result)}</span>
      </summary>
      <Part title="Arguments" text={sent} label={`Copy the arguments of ${name}`} />
      {children}
      {run?.phase === "running" && (
        <div class="tool-call-actions">
          <button type="button" class="button" onClick={run.stop}>
            Stop
          </button>
        </div>
      )}
      {result !== undefined && <Part title="Result" text={indentJson(result)} label={`Copy the result of ${name}`} />}
    </details>
  );
}

/** Say how a call ended, and how long it took if this browser ran it. */
function describe(call: WireCall, run: CallRun | undefined, result: string | undefined): string {
  if (run?.phase === "running") return "running";
  if (result === undefined) return "no result";
  const ending = endingOf(call.call_id, run);
  const kind = ending?.isError ? "error" : "result";
  return typeof ending?.seconds === "number" ? `${kind}, ${ending.seconds.toFixed(2)} s` : kind;
}

function Confirmation({ message, call }: { message: Message; call: WireCall }) {
  const chat = useChat();
  const thread = chat.thread.value;
  return (
    <div class="tool-call-actions" role="group" aria-label={`Run ${toolName(call)}?`}>
      <button type="button" class="button button-main" onClick={() => void runCall(chat, thread, message, call, true)}>
        Run
      </button>
      <button type="button" class="button" onClick={() => allowTool(chat, thread, message, call)}>
        Always in this chat
      </button>
      <button type="button" class="button" onClick={() => declineCall(chat, thread, message, call)}>
        Decline
      </button>
    </div>
  );
}

function Part({ title, text, label }: { title: string; text: string; label: string }) {
  return (
    <section aria-label={title}>
      <div class="tool-call-head">
        {title}
        <CopyButton text={() => text} label={label} />
      </div>
      <pre tabIndex={0}>{text}</pre>
    </section>
  );
}

/** JSON with line breaks; as it is if it is none, or if reading it would change it, such as large numbers. */
function indentJson(text: string): string {
  try {
    const value: unknown = JSON.parse(text);
    return withoutSpaces(JSON.stringify(value)) === withoutSpaces(text) ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text;
  }
}

const withoutSpaces = (text: string) => text.replace(/\s/g, "");
