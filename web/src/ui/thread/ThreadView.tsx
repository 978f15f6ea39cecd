// The shown path of the conversation. Of a long one only the rows near the viewport are in the document
// (virtualRows.ts), at a stable scroll position (threadScroll.ts).

import { useSignalEffect } from "@preact/signals";
import { useEffect, useLayoutEffect, useMemo, useRef } from "preact/hooks";
import type { Thread } from "../../chat/thread";
import type { Message } from "../../chat/tree";
import { useChat } from "../context";
import { EmptyState } from "../EmptyState";
import { Down } from "../icons";
import { lazy } from "../lazy";
import { focusComposer, requestedMessage, restoredMessage } from "../navigation";
import { Answer } from "./Answer";
import { Candidates } from "./Candidates";
import { ThreadScroll } from "./threadScroll";
import { UserMessage } from "./UserMessage";
import { MAX_UNVIRTUALIZED_ROWS } from "./virtualRows";

const LiveBeams = lazy(async () => (await import("./LiveBeams")).LiveBeams);
const ComparedAnswers = lazy(async () => (await import("./CompareSettings")).ComparedAnswers);

export function ThreadView() {
  const chat = useChat();
  const thread = chat.thread.value;
  const scroller = useRef<HTMLDivElement>(null);
  const inner = useRef<HTMLDivElement>(null);
  const scroll = useMemo(() => new ThreadScroll(), []);
  const path = thread.tree.value.path.value;
  void scroll.version.value;

  useEffect(() => scroll.attach(scroller.current!, inner.current!), []);
  useSignalEffect(() => {
    if (chat.thread.value) scroll.reset();
  });
  useSignalEffect(() => {
    if (chat.live.value) scroll.scrollToEnd();
  });
  useLayoutEffect(() => scroll.restorePosition());
  useKeptFocus(scroll, thread, path);
  useRequestedMessage(scroll, thread, path);

  return (
    <div class="thread-area">
      <div
        class="thread-scroll"
        ref={scroller}
        onScroll={() => scroll.onScroll()}
        onFocusIn={(event) => scroll.onFocusMoved(event.target)}
        onFocusOut={(event) => scroll.onFocusMoved(event.relatedTarget)}
        role="region"
        aria-label="Messages"
        tabIndex={0} // scrolled by key, also while nothing in it can have the focus
      >
        <div class="thread" ref={inner}>
          {path.length === 0 ? <EmptyThread /> : <Rows path={path} scroll={scroll} />}
        </div>
      </div>
      {!scroll.pinned.value && (
        <button
          type="button"
          class="scroll-to-end"
          aria-label="Jump to the latest"
          onClick={() => scroll.scrollToEnd()}
        >
          <Down />
        </button>
      )}
    </div>
  );
}

function Rows({ path, scroll }: { path: readonly Message[]; scroll: ThreadScroll }) {
  const partial = path.length > MAX_UNVIRTUALIZED_ROWS;
  return (
    <div class="rows" role={partial ? "list" : undefined}>
      {scroll.slots(path).map((slot) => {
        if (!("index" in slot)) {
          return (
            <div
              key={`space-${slot.before}`}
              class="row-space"
              aria-hidden="true"
              style={{ height: `${slot.spacePx}px` }}
            />
          );
        }
        const message = path[slot.index]!;
        const ariaProps = partial
          ? { role: "listitem" as const, "aria-posinset": slot.index + 1, "aria-setsize": path.length }
          : {};
        return <RowSlot key={message.key} message={message} scroll={scroll} ariaProps={ariaProps} />;
      })}
    </div>
  );
}

function RowSlot({ message, scroll, ariaProps }: { message: Message; scroll: ThreadScroll; ariaProps: object }) {
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    scroll.setRowElement(message.key, box.current);
    return () => scroll.setRowElement(message.key, null);
  }, [message.key]);
  return (
    <div class="row" data-key={message.key} tabIndex={-1} ref={box} {...ariaProps}>
      <MessageRow message={message} />
    </div>
  );
}

const labelOf = (element: Element | null) => element?.getAttribute("aria-label") ?? element?.textContent;

/** Keep the focus in the thread when the row that has it is replaced or removed, as by Regenerate and Delete. */
function useKeptFocus(scroll: ThreadScroll, thread: Thread, path: readonly Message[]): void {
  const former = useRef({ thread, path });
  const focused = document.activeElement; // before the rows are rendered
  const key = focused?.closest<HTMLElement>(".row")?.dataset.key;
  useLayoutEffect(() => {
    const { thread: formerThread, path: formerPath } = former.current;
    former.current = { thread, path };
    const restored = restoredMessage.value;
    restoredMessage.value = null;
    const at = restored === null ? formerPath.findIndex((message) => message.key === key) : path.indexOf(restored);
    const isLost = restored !== null || (thread === formerThread && document.activeElement === document.body);
    if (at < 0 || !isLost) return;
    const message = path[Math.min(at, path.length - 1)];
    if (message) scroll.focusRow(message, labelOf(focused));
    else focusComposer();
  }, [path, restoredMessage.value]);
}

/** Scroll to the requested message when it is loaded; show its branch first if necessary. */
function useRequestedMessage(scroll: ThreadScroll, thread: Thread, path: readonly Message[]): void {
  const chat = useChat();
  const wanted = requestedMessage.value;
  const state = thread.state.value;
  useEffect(() => {
    if (wanted === null || state === "loading") return;
    const tree = thread.tree.value;
    const message = tree.get(wanted) ?? tree.byId(wanted);
    if (message && !path.includes(message)) {
      tree.reveal(message);
      chat.choose(message);
      return; // runs again with the new path
    }
    requestedMessage.value = null;
    if (message) scroll.scrollToRow(message);
  }, [wanted, state, path]);
}

function EmptyThread() {
  const chat = useChat();
  const { state, id } = chat.thread.value;
  if (state.value === "ready") return <EmptyState />;
  if (state.value === "loading") return <p class="pending">Loading</p>;
  const missing = state.value === "missing";
  return (
    <div class="load-problem">
      <p>{missing ? "This conversation does not exist on this server." : "The conversation did not load."}</p>
      {missing ? (
        <button type="button" class="button" onClick={() => chat.newConversation()}>
          Start a new one
        </button>
      ) : (
        <button type="button" class="button" onClick={() => void chat.open(id.value ?? "")}>
          Try again
        </button>
      )}
    </div>
  );
}

// One message in its current form: user message, answer, or candidates.

function MessageRow({ message }: { message: Message }) {
  const chat = useChat();
  const thread = chat.thread.value;
  if (message.role === "user") {
    const unanswered =
      thread.tree.value.leaf.value === message && thread.live.value === null && !thread.awaitingServer.value;
    return (
      <>
        <UserMessage message={message} />
        {unanswered && (
          <div class="ending">
            <span>No answer is stored.</span>
            <button type="button" class="button" onClick={() => chat.answer(message)}>
              Answer
            </button>
          </div>
        )}
      </>
    );
  }
  const turn = thread.turnOf(message);
  const compared = thread.comparedWith(message);
  if (compared) return <ComparedAnswers answers={compared} chosen={message} />;
  if (turn?.live && (turn.beams || turn.beamTree.value)) return <LiveBeams turn={turn} />;
  if (turn?.showsCandidates.value && turn.candidates.length > 1) return <Candidates turn={turn} chosen={message} />;
  return <Answer message={message} turn={turn} />;
}
