// Candidates of one prompt side by side, each in a card.

import { useComputed } from "@preact/signals";
import type { Message, Status } from "../../chat/tree";
import type { Turn } from "../../chat/turn";
import { useChat } from "../context";
import { Again, Close } from "../icons";
import { AnswerStats, CacheStrip, DroppedNote, UnsavedBadge } from "./AnswerStats";
import { Ending, Markdown, Pending, Reasoning } from "./MessageParts";

export function Candidates({ turn, chosen }: { turn: Turn; chosen: Message }) {
  const chat = useChat();
  const usage = turn.usage.value;
  const count = turn.candidates.length;
  const kind = turn.beams ? "beams" : "answers";
  return (
    <section class="candidates" aria-label={`${count} ${kind}, pick one`}>
      <header class="candidates-head">
        <span class="candidates-title">
          {count} {kind} from one prompt
        </span>
        <span class="candidates-prompt">
          {usage && <CacheStrip usage={usage} />}
          {usage && (
            <span class="hint">
              {usage.inputTokens} prompt tokens, shared by all {count}
            </span>
          )}
        </span>
      </header>
      <div class="candidates-scroll" tabIndex={0} role="group" aria-label="Candidates">
        {turn.candidates.map((message, index) => (
          <CandidateCard key={message.key} message={message} turn={turn} index={index} current={message === chosen} />
        ))}
      </div>
      <footer class="answer-foot">
        <div class="tools">
          <button
            type="button"
            class="tool tool-regenerate"
            aria-label="Regenerate all"
            title="Regenerate all"
            disabled={chat.live.value !== null}
            onClick={() => chat.regenerate(chosen)}
          >
            <Again />
          </button>
          <span class="hint">
            Pick one to continue<span class="key-hint">: click it, or Alt+1 … Alt+{count}</span>
          </span>
        </div>
        <UnsavedBadge turn={turn} />
        <AnswerStats turn={turn} strip={false} />
      </footer>
    </section>
  );
}

const STATUS_LABELS: Readonly<Record<Status, string>> = {
  waiting: "waiting",
  streaming: "generating",
  done: "done",
  stopped: "stopped",
  length: "cut off",
  error: "failed",
};

interface CardProps {
  readonly message: Message;
  readonly turn: Turn;
  readonly index: number;
  readonly current: boolean;
}

function CandidateCard({ message, turn, index, current }: CardProps) {
  const chat = useChat();
  const status = message.status.value;
  const open = status === "waiting" || status === "streaming";
  const isEmpty = useComputed(() => message.text.value === "");
  const dropped = turn.dropped.value.get(message);
  const pick = (event: MouseEvent) => {
    const inside = event.target as HTMLElement;
    if (inside.closest("a, button, pre") || getSelection()?.isCollapsed === false) return;
    chat.pick(message);
  };
  return (
    <div class={`candidate-slot candidate-slot-${index}`}>
      <div class="candidate-stem" aria-hidden="true" />
      <article
        class={`card ${current ? "card-current" : ""} ${dropped ? "card-dropped" : ""}`}
        data-status={status}
        aria-label={`Answer ${index + 1}`}
        aria-busy={open}
        onClick={pick}
      >
        <header class="card-head">
          <span class="card-number">{index + 1}</span>
          <span class="card-state">{dropped ? "dropped" : STATUS_LABELS[status]}</span>
          {turn.canDrop(message) && (
            <button
              type="button"
              class="tool card-drop"
              aria-label={`Drop answer ${index + 1}`}
              title="Stop this answer and free its KV pages (Alt+Del)"
              onClick={() => chat.drop(message)}
            >
              <Close />
            </button>
          )}
        </header>
        <div class="card-body">
          <Reasoning message={message} turn={turn} />
          {isEmpty.value && open && <Pending turn={turn} />}
          <Markdown message={message} />
          {dropped ? <DroppedNote receipt={dropped} /> : <Ending message={message} />}
        </div>
        <button
          type="button"
          class="button card-pick"
          aria-keyshortcuts={`Alt+${index + 1}`}
          onClick={() => chat.pick(message)}
        >
          <span>
            Pick<span class="sr-only"> answer {index + 1}</span>
          </span>
          <kbd aria-hidden="true">Alt {index + 1}</kbd>
        </button>
      </article>
    </div>
  );
}
