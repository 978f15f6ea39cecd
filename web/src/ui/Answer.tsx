// One answer at full width: its text, its tools, its figures. A click on a word shows what else could stand there.
import { useComputed } from "@preact/signals";
import { clickForAlternatives } from "../state/settings";
import type { Message } from "../state/tree";
import type { Turn } from "../state/turn";
import { useChat } from "./context";
import { CopyButton } from "./CopyButton";
import { AnswerStats, UnsavedBadge } from "./Figures";
import { Again, Columns, Fork } from "./icons";
import { Markdown } from "./Markdown";
import { VersionSwitcher } from "./Switcher";
import { Reasoning } from "./Thought";
import { TokenText } from "./TokenText";
import { Pending } from "./Waiting";
import { wordOffset, wordAtPoint } from "./wordAt";

export function Answer({ message, turn }: { message: Message; turn: Turn | undefined }) {
  const chat = useChat();
  const status = message.status.value;
  const open = status === "waiting" || status === "streaming";
  const blank = useComputed(() => message.text.value === ""); // not the text itself: it changes with every frame
  const inside = chat.forks.inspector.value;
  const tokens = inside?.message === message && inside.word === null ? inside : null;
  const onClick = (event: MouseEvent) => {
    const prose = (event.target as HTMLElement).closest<HTMLElement>(".prose");
    const busy = (event.target as HTMLElement).closest("a, button") || getSelection()?.isCollapsed === false;
    if (!prose || busy || !clickForAlternatives.value || !chat.forks.canOpen(message)) return;
    const word = wordAtPoint(prose, event.clientX, event.clientY);
    const offset = word && wordOffset(message.text.value, prose, word);
    if (!word || offset === null) return;
    const box = () => (word.range.startContainer.isConnected ? word.range.getBoundingClientRect() : null);
    void chat.forks.open(message, { offset, box });
  };
  return (
    <article class="answer" aria-label="Assistant" data-status={status} aria-busy={open} onClick={onClick}>
      <Reasoning message={message} turn={turn} />
      {blank.value && open && <Pending turn={turn} />}
      {tokens ? <TokenText inside={tokens} /> : <Markdown message={message} />}
      <Ending message={message} alone />
      {!open && (
        <div class="answer-foot">
          <div class="tools">
            <VersionSwitcher message={message} />
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
            <button
              type="button"
              class="tool tool-inside"
              aria-label="Branch inside"
              aria-pressed={tokens !== null}
              title="Branch inside: every token, and what else could stand there. A click on a word does it too."
              disabled={!tokens && !chat.forks.canOpen(message)}
              onClick={() => (tokens ? chat.forks.close() : void chat.forks.open(message))}
            >
              <Fork />
            </button>
            {turn && turn.candidates.length > 1 && (
              <button type="button" class="tool tool-wide" onClick={() => (turn.showsCandidates.value = true)}>
                <Columns /> Compare {turn.candidates.length}
              </button>
            )}
          </div>
          {turn && <UnsavedBadge turn={turn} />}
          {turn && <AnswerStats turn={turn} />}
        </div>
      )}
    </article>
  );
}

/** Why a text ended where it did, when it was not the model's own end. */
export function Ending({ message, alone = false }: { message: Message; alone?: boolean }) {
  const chat = useChat();
  const status = message.status.value;
  if (status === "stopped" || status === "length") {
    return (
      <div class="ending">
        <span>{status === "stopped" ? "Stopped." : "Cut at the token limit."}</span>
        {alone && (
          <button type="button" class="button" disabled={!chat.forks.canOpen(message)} onClick={() => void chat.forks.continueAnswer(message)}>
            Continue
          </button>
        )}
      </div>
    );
  }
  if (status !== "error") return null;
  return (
    <div class="ending ending-error" role="alert">
      <span>{message.error.value}</span>
      <button type="button" class="button" onClick={() => chat.regenerate(message)}>Try again</button>
    </div>
  );
}
