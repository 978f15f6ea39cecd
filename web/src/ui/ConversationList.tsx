// Conversations by day, pinned ones on top. The end of the list brings the older ones.
import { useEffect, useId, useRef } from "preact/hooks";
import type { Group } from "../state/groups";
import { ConversationRow } from "./ConversationRow";
import { useChat } from "./context";

export function ConversationList() {
  const list = useChat().conversations;
  const groups = list.groups.value;
  const state = list.state.value;
  return (
    <div class="side-scroll" onKeyDown={moveBetweenRows}>
      {groups.map((group) => <DayGroup key={group.name} group={group} />)}
      {state === "ready" && groups.length === 0 && (
        <p class="side-empty">Your conversations will be listed here. Drop an export of ChatGPT or of this server to bring yours along.</p>
      )}
      {state === "failed" && (
        <p class="side-empty">
          The list did not load. <button type="button" class="link" onClick={() => void list.refresh()}>Try again</button>
        </p>
      )}
      {list.hasMore.value && <LoadMore onWanted={() => list.loadMore()} />}
    </div>
  );
}

function DayGroup({ group }: { group: Group }) {
  const id = useId();
  return (
    <section aria-labelledby={id}>
      <h2 class="side-day" id={id}>{group.name}</h2>
      <ul class="side-list">
        {group.conversations.map((conversation) => (
          <ConversationRow key={conversation.id} conversation={conversation} />
        ))}
      </ul>
    </section>
  );
}

/** Asks for more when it comes into view; a button for whoever does not scroll. */
export function LoadMore({ onWanted }: { onWanted: () => Promise<void> }) {
  const button = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    const seen = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) void onWanted();
    });
    if (button.current) seen.observe(button.current);
    return () => seen.disconnect();
  });
  return <button type="button" class="link side-more" ref={button} onClick={() => void onWanted()}>Older conversations</button>;
}

/** Arrow keys go from row to row. */
export function moveBetweenRows(event: KeyboardEvent & { currentTarget: HTMLElement }): void {
  const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
  if (step === 0 || event.altKey || !(event.target as HTMLElement).classList.contains("side-open")) return;
  const rows = [...event.currentTarget.querySelectorAll<HTMLElement>(".side-open")];
  const at = rows.indexOf(event.target as HTMLElement) + step;
  event.preventDefault();
  if (at < 0) document.getElementById("find")?.focus();
  else rows[at]?.focus();
}
