// Function calls of an answer as cards: name, arguments, and the output that the client sent back on the shown branch.

import type { WireCall } from "../../api/frames";
import { truncate } from "../../app/format";
import type { Message } from "../../chat/tree";
import { useChat } from "../context";
import { CopyButton } from "./MessageParts";
import "./tool-calls.css";

const SUMMARY_CHARS = 80;

export function ToolCalls({ message }: { message: Message }) {
  const tree = useChat().thread.value.tree.value;
  void tree.path.value;
  const outputs = tree.chosenChild(message.key)?.callOutputs.value ?? [];
  return (
    <>
      {message.calls.value.map((call) => (
        <ToolCall key={call.call_id} call={call} output={outputs.find(({ callId }) => callId === call.call_id)?.text} />
      ))}
    </>
  );
}

function ToolCall({ call, output }: { call: WireCall; output: string | undefined }) {
  const name = [call.namespace, call.name].filter(Boolean).join(".");
  const sent = indentJson(call.arguments);
  return (
    <details class="tool-call">
      <summary>
        <b>{name}</b> <code>{truncate(call.arguments, SUMMARY_CHARS)}</code>
        <span class="hint">{output === undefined ? "no result" : "result"}</span>
      </summary>
      <Part title="Arguments" text={sent} label={`Copy the arguments of ${name}`} />
      {output !== undefined && <Part title="Result" text={indentJson(output)} label={`Copy the result of ${name}`} />}
    </details>
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
