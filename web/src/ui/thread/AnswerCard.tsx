// Card of one answer among others that are shown side by side, and how their texts differ.

import { useComputed } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { formatPercent, plural } from "../../app/format";
import type { TextPart } from "../../chat/compare";
import type { Message } from "../../chat/tree";
import type { Turn } from "../../chat/turn";
import { useChat } from "../context";
import { lazy } from "../lazy";
import { DroppedNote } from "./AnswerStats";
import { Ending, Markdown, Pending, Reasoning, STATUS_LABELS } from "./MessageParts";
import { SchemaStatus } from "./SchemaStatus";

export const ToolCalls = lazy(async () => (await import("./ToolCalls")).ToolCalls);

interface CardProps {
  readonly message: Message;
  readonly turn: Turn | undefined;
  readonly number: number;
  readonly place: number; // on screen
  readonly current: boolean;
  readonly parts: readonly TextPart[] | null; // its differences; null: it is shown as usual
  readonly likelihood?: number | null;
  readonly isWide?: boolean;
  readonly tools?: ComponentChildren;
  readonly note?: ComponentChildren; // above the text
}

export function AnswerCard(props: CardProps) {
  const { message, turn, number, place, current, parts, likelihood = null, isWide = false, tools, note } = props;
  const chat = useChat();
  const status = message.status.value;
  const open = status === "waiting" || status === "streaming";
  const isEmpty = useComputed(() => message.text.value === "");
  const dropped = turn?.dropped.value.get(message);
  const pick = (event: MouseEvent) => {
    const inside = event.target as HTMLElement;
    if (inside.closest("a, button, pre, summary") || getSelection()?.isCollapsed === false) return;
    chat.pick(message);
  };
  return (
    <div class={`candidate-slot candidate-slot-${place}`}>
      <div class="candidate-stem" aria-hidden="true" />
      <article
        class={`card ${current ? "card-current" : ""} ${dropped ? "card-dropped" : ""} ${isWide ? "card-wide" : ""}`}
        data-status={status}
        aria-label={`Answer ${number}`}
        aria-busy={open}
        onClick={pick}
      >
        <header class="card-head">
          <span class="card-number">{number}</span>
          {likelihood !== null && (
            <span class="card-likelihood" title="Mean probability of its tokens">
              {formatPercent(likelihood)}
            </span>
          )}
          <span class="card-state">{dropped ? "dropped" : STATUS_LABELS[status]}</span>
          {tools}
        </header>
        <div class="card-body">
          {note}
          <Reasoning message={message} turn={turn} />
          {isEmpty.value && open && <Pending turn={turn} />}
          {parts ? <Differences parts={parts} /> : <Markdown message={message} />}
          {message.calls.value.length > 0 && <ToolCalls message={message} />}
          {dropped ? <DroppedNote receipt={dropped} /> : <Ending message={message} />}
          {turn && !dropped && <SchemaStatus message={message} turn={turn} />}
        </div>
        <button
          type="button"
          class="button card-pick"
          aria-keyshortcuts={`Alt+${number}`}
          onClick={() => chat.pick(message)}
        >
          <span>
            Pick<span class="sr-only"> answer {number}</span>
          </span>
          <kbd aria-hidden="true">Alt {number}</kbd>
        </button>
      </article>
    </div>
  );
}

/** The rest of an answer after the common beginning; what the compared answer does not have is marked. */
function Differences({ parts }: { parts: readonly TextPart[] }) {
  return (
    <p class="differences" dir="auto">
      {parts.length === 0 && <span class="hint">(no further text)</span>}
      {parts.map(({ text, differs }, index) => (differs ? <mark key={index}>{text}</mark> : text))}
    </p>
  );
}

/** The text that all shown answers begin with, folded. */
export function CommonBeginning({ text }: { text: string }) {
  if (text.trim() === "") return null;
  return (
    <details class="candidates-common">
      <summary>All begin with the same {plural(text.length, "character")}</summary>
      {text}
    </details>
  );
}
