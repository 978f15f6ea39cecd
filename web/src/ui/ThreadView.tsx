// The shown path of the conversation, and a scroll that follows only a reader who is at the bottom.
import { useSignal, useSignalEffect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import type { Message } from "../state/tree";
import { Answer } from "./Answer";
import { Candidates } from "./Candidates";
import { useChat } from "./context";
import { Empty } from "./Empty";
import { Down } from "./icons";
import { UserMessage } from "./UserMessage";

const NEAR_PX = 48;

export function ThreadView() {
  const chat = useChat();
  const thread = chat.thread.value;
  const scroller = useRef<HTMLDivElement>(null);
  const inner = useRef<HTMLDivElement>(null);
  const pinned = useSignal(true);
  const path = thread.tree.value.path.value;

  // Grown content moves a pinned reader; it never moves one who scrolled up. The start page is read from its top.
  useEffect(() => {
    const box = scroller.current;
    if (!box || !inner.current) return;
    const observer = new ResizeObserver(() => {
      const empty = chat.thread.value.tree.value.path.value.length === 0;
      if (pinned.value) box.scrollTo({ top: empty ? 0 : box.scrollHeight });
    });
    observer.observe(inner.current);
    observer.observe(box);
    return () => observer.disconnect();
  }, []);
  useSignalEffect(() => {
    if (chat.live.value || chat.thread.value) pinned.value = true;
  });
  const onScroll = () => {
    const box = scroller.current;
    const empty = chat.thread.value.tree.value.path.value.length === 0;
    if (box) pinned.value = empty || box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PX;
  };
  const toEnd = () => {
    pinned.value = true;
    scroller.current?.scrollTo({ top: scroller.current.scrollHeight, behavior: "smooth" });
  };

  return (
    <div class="thread-area">
      <div class="thread-scroll" ref={scroller} onScroll={onScroll} tabIndex={-1}>
        <div class="thread" ref={inner}>
          {path.length === 0 ? <Start /> : path.map((message) => <Row key={message.key} message={message} />)}
        </div>
      </div>
      {!pinned.value && (
        <button type="button" class="to-end" aria-label="Jump to the latest" onClick={toEnd}>
          <Down />
        </button>
      )}
    </div>
  );
}

function Start() {
  const chat = useChat();
  const { state, id } = chat.thread.value;
  if (state.value === "ready") return <Empty />;
  if (state.value === "loading") return <p class="waiting">Loading</p>;
  const missing = state.value === "missing";
  return (
    <div class="missing">
      <p>{missing ? "This conversation does not exist on this server." : "The conversation did not load."}</p>
      {missing ? (
        <button type="button" class="button" onClick={() => chat.newConversation()}>Start a new one</button>
      ) : (
        <button type="button" class="button" onClick={() => void chat.open(id.value ?? "")}>Try again</button>
      )}
    </div>
  );
}

function Row({ message }: { message: Message }) {
  const chat = useChat();
  const thread = chat.thread.value;
  if (message.role === "user") {
    const unanswered = thread.tree.value.leaf.value === message && thread.live.value === null && !thread.settling.value;
    return (
      <>
        <UserMessage message={message} />
        {unanswered && (
          <div class="ending">
            <span>No answer is stored.</span>
            <button type="button" class="button" onClick={() => chat.answer(message)}>Answer</button>
          </div>
        )}
      </>
    );
  }
  const turn = thread.turnOf(message);
  if (turn && turn.open.value && turn.candidates.length > 1) return <Candidates turn={turn} chosen={message} />;
  return <Answer message={message} turn={turn} />;
}
