// One answer at full width: text, tools, statistics. Clicking a word shows its alternatives.

import { useComputed, useSignal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { clickForAlternatives } from "../../app/settings";
import type { Message } from "../../chat/tree";
import type { Turn } from "../../chat/turn";
import { useChat } from "../context";
import { Again, Columns, Edit, Tokens } from "../icons";
import { lazy } from "../lazy";
import type { MenuItem } from "../Menu";
import { comparedAnswer } from "../navigation";
import { ReadAloudButton } from "../ReadAloud";
import { ToolCalls } from "./AnswerCard";
import { AnswerStats, UnsavedBadge } from "./AnswerStats";
import { type EditorAction, MessageEditor, MessageMenu } from "./MessageEditor";
import { CopyButton, Ending, Markdown, Pending, Reasoning, VersionSwitcher } from "./MessageParts";
import { SchemaStatus } from "./SchemaStatus";
import { wordAtPoint, wordOffset } from "./wordAtPoint";

const CompareSettingsForm = lazy(async () => (await import("./CompareSettings")).CompareSettingsForm);
const TokenText = lazy(async () => (await import("./TokenView")).TokenText);
const DOUBLE_CLICK_MS = 250;

export function Answer({ message, turn }: { message: Message; turn: Turn | undefined }) {
  const chat = useChat();
  const status = message.status.value;
  const open = status === "waiting" || status === "streaming";
  const isEmpty = useComputed(() => message.text.value === ""); // not the text itself, which changes with every frame
  const inspector = chat.forks.inspector.value;
  const tokens = inspector?.message === message && inspector.word === null ? inspector : null;
  const editing = useSignal(false);
  const clickTimer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  const onClick = (event: MouseEvent) => {
    clearTimeout(clickTimer.current);
    const prose = (event.target as HTMLElement).closest<HTMLElement>(".prose");
    const busy =
      (event.target as HTMLElement).closest("a, button, .reasoning") || getSelection()?.isCollapsed === false;
    if (!prose || busy || !clickForAlternatives.value || !chat.forks.canOpen(message)) return;
    const word = wordAtPoint(prose, event.clientX, event.clientY);
    const offset = word && wordOffset(message.text.value, prose, word);
    if (!word || offset === null || event.detail > 1) return;
    const box = () => (word.range.startContainer.isConnected ? word.range.getBoundingClientRect() : null);
    // a second click selects the word instead
    clickTimer.current = setTimeout(() => {
      if (getSelection()?.isCollapsed !== false) void chat.forks.open(message, { offset, box });
    }, DOUBLE_CLICK_MS);
  };
  const regenerate = useRef<HTMLButtonElement>(null);
  const isIdle = !open && chat.live.value === null;
  // the row has the focus after Regenerate
  useLayoutEffect(() => {
    if (isIdle && document.activeElement === regenerate.current?.closest(".row"))
      regenerate.current?.focus({ preventScroll: true });
  }, [isIdle]);
  if (editing.value) return <AnswerEditor message={message} onClose={() => (editing.value = false)} />;
  const other = otherVersion(chat.thread.value.tree.value.versions(message), message);
  const menu: MenuItem[] = [
    { label: "Edit", icon: <Edit />, run: () => (editing.value = true) },
    { label: "Compare settings…", icon: <Columns />, run: () => (comparedAnswer.value = message) },
  ];
  if (other)
    menu.push({ label: other.label, icon: <Columns />, run: () => (chat.thread.value.compared.value = other.pair) });
  return (
    <article class="answer" aria-label="Assistant" data-status={status} aria-busy={open} onClick={onClick}>
      <Reasoning message={message} turn={turn} />
      {isEmpty.value && open && <Pending turn={turn} />}
      {tokens ? <TokenText inspector={tokens} /> : <Markdown message={message} />}
      {message.calls.value.length > 0 && <ToolCalls message={message} />}
      <Ending message={message} alone />
      {turn && <SchemaStatus message={message} turn={turn} />}
      {comparedAnswer.value === message && (
        <CompareSettingsForm message={message} onClose={() => (comparedAnswer.value = null)} />
      )}
      {!open && (
        <div class="answer-foot">
          <div class="tools">
            <VersionSwitcher message={message} />
            <CopyButton text={() => message.text.value} label="Copy answer" />
            <ReadAloudButton />
            <button
              type="button"
              class="tool tool-regenerate"
              ref={regenerate}
              aria-label="Regenerate"
              title="Regenerate"
              disabled={chat.live.value !== null}
              onClick={() => chat.regenerate(message)}
            >
              <Again />
            </button>
            <button
              type="button"
              class="tool tool-tokens"
              aria-label="Show tokens"
              aria-pressed={tokens !== null}
              title={
                message.tokens.value === 0
                  ? "The tokens of this answer are not stored: it was imported or edited."
                  : "Show tokens: every token with its alternatives. Clicking a word selects its token."
              }
              disabled={!tokens && !chat.forks.canOpen(message)}
              onClick={() => (tokens ? chat.forks.close() : void chat.forks.open(message))}
            >
              <Tokens />
            </button>
            <MessageMenu message={message} entries={menu} />
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

/** The version before this one, or the one after the first, to be compared with it; null if there is no other. */
function otherVersion(siblings: readonly Message[], message: Message) {
  const at = siblings.indexOf(message);
  const other = siblings[at === 0 ? 1 : at - 1];
  if (!other) return null;
  return {
    label: `Compare with version ${siblings.indexOf(other) + 1}`,
    pair: at === 0 ? [message, other] : [other, message],
  };
}

/** Editor of an answer: the new text is another version, which the model may continue. */
function AnswerEditor({ message, onClose }: { message: Message; onClose: () => void }) {
  const chat = useChat();
  const question = chat.thread.value.questionOf(message);
  const actions: EditorAction[] = [{ label: "Save", run: (text) => void chat.edits.saveVersion(message, text) }];
  if (question) actions.push({ label: "Continue", run: (text) => chat.answerFrom(question, text) });
  return (
    <MessageEditor
      message={message}
      label="Edit answer"
      text={message.text.value}
      hint="The old version stays as a branch. Continue: the model goes on from this text."
      actions={actions}
      isTall
      onClose={onClose}
    />
  );
}
