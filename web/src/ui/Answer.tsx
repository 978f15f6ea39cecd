// One answer at full width: its text, its tools, its figures.
import { useComputed } from "@preact/signals";
import type { Message } from "../state/tree";
import type { Turn } from "../state/turn";
import { useChat } from "./context";
import { CopyButton } from "./CopyButton";
import { Figures } from "./Figures";
import { Again, Columns } from "./icons";
import { Markdown } from "./Markdown";
import { Switcher } from "./Switcher";
import { Waiting } from "./Waiting";

export function Answer({ message, turn }: { message: Message; turn: Turn | undefined }) {
  const chat = useChat();
  const status = message.status.value;
  const open = status === "waiting" || status === "streaming";
  const blank = useComputed(() => message.text.value === ""); // not the text itself: it changes with every frame
  return (
    <article class="answer" aria-label="Assistant" data-status={status} aria-busy={open}>
      {blank.value && open && <Waiting turn={turn} />}
      <Markdown message={message} />
      <Ending message={message} />
      {!open && (
        <div class="answer-foot">
          <div class="tools">
            <Switcher message={message} />
            <CopyButton text={() => message.text.value} label="Copy answer" />
            <button
              type="button"
              class="tool tool-again"
              aria-label="Regenerate"
              title="Regenerate"
              disabled={chat.live.value !== null}
              onClick={() => chat.regenerate(message)}
            >
              <Again />
            </button>
            {turn && turn.candidates.length > 1 && (
              <button type="button" class="tool tool-wide" onClick={() => (turn.open.value = true)}>
                <Columns /> Compare {turn.candidates.length}
              </button>
            )}
          </div>
          {turn && <Figures turn={turn} />}
        </div>
      )}
    </article>
  );
}

/** Why a text ended where it did, when it was not the model's own end. */
export function Ending({ message }: { message: Message }) {
  const chat = useChat();
  const status = message.status.value;
  if (status === "stopped") return <p class="ending">Stopped.</p>;
  if (status === "length") return <p class="ending">Cut at the token limit.</p>;
  if (status !== "error") return null;
  return (
    <div class="ending ending-error" role="alert">
      <span>{message.error.value}</span>
      <button type="button" class="button" onClick={() => chat.regenerate(message)}>Try again</button>
    </div>
  );
}
