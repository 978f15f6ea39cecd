// Conversations grouped by day, pinned ones first; older ones are loaded at the end of the list.

import { useSignal } from "@preact/signals";
import { useEffect, useId, useLayoutEffect, useRef } from "preact/hooks";
import type { WireConversation } from "../../api/frames";
import type { Group } from "../../conversations/conversations";
import { isPinned } from "../../conversations/metadata";
import { useChat } from "../context";
import { copyShareLink, exportConversation, share, stopSharing } from "../fileActions";
import { Close, Copy, Download, Edit, More, Pin, Share, Spark, Trash } from "../icons";
import { MenuButton, type MenuItem } from "../Menu";
import { closeSidebarIfNarrow, removeConversation } from "../navigation";

export function ConversationList() {
  const list = useChat().conversations;
  const groups = list.groups.value;
  const state = list.state.value;
  return (
    <div class="list-scroll" onKeyDown={moveBetweenRows}>
      {groups.map((group) => (
        <DayGroup key={group.name} group={group} />
      ))}
      {state === "ready" && groups.length === 0 && (
        <p class="list-empty">
          No conversations yet. Drop an export of this server or of another chat program here to import it.
        </p>
      )}
      {state === "failed" && (
        <p class="list-empty">
          The list did not load.{" "}
          <button type="button" class="link" onClick={() => void list.refresh()}>
            Try again
          </button>
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
      <h2 class="list-heading" id={id}>
        {group.name}
      </h2>
      <ul class="list-items">
        {group.conversations.map((conversation) => (
          <ConversationRow key={conversation.id} conversation={conversation} />
        ))}
      </ul>
    </section>
  );
}

/** Load more entries when the button becomes visible or is clicked. */
export function LoadMore({ onWanted }: { onWanted: () => Promise<void> }) {
  const button = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    const seen = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) void onWanted();
    });
    if (button.current) seen.observe(button.current);
    return () => seen.disconnect();
  });
  return (
    <button type="button" class="link list-more" ref={button} onClick={() => void onWanted()}>
      Older conversations
    </button>
  );
}

/** Move the focus between rows with the arrow keys. */
export function moveBetweenRows(event: KeyboardEvent & { currentTarget: HTMLElement }): void {
  const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
  if (step === 0 || event.altKey || !(event.target as HTMLElement).classList.contains("conversation-open")) return;
  const rows = [...event.currentTarget.querySelectorAll<HTMLElement>(".conversation-open")];
  const at = rows.indexOf(event.target as HTMLElement) + step;
  event.preventDefault();
  if (at < 0) document.getElementById("find")?.focus();
  else rows[at]?.focus();
}

// -- One row: title, status, rename in place, menu

function ConversationRow({ conversation }: { conversation: WireConversation }) {
  const chat = useChat();
  const { id } = conversation;
  const renaming = useSignal(false);
  const button = useRef<HTMLButtonElement>(null);
  const title = conversation.title || "Untitled";
  const current = chat.thread.value.id.value === id;
  const open = () => {
    void chat.open(id);
    closeSidebarIfNarrow();
  };
  const done = (name: string | null) => {
    renaming.value = false;
    if (name !== null) void chat.conversations.rename(id, name.trim());
    setTimeout(() => button.current?.focus()); // after the row is rendered again
  };
  const remove = () => {
    const rows = [...document.querySelectorAll<HTMLElement>(".conversation-open")];
    const at = rows.indexOf(button.current!);
    (rows[at + 1] ?? rows[at - 1])?.focus(); // otherwise the focus is lost with the row
    removeConversation(chat, id);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "F2") renaming.value = true;
    else if (event.key === "Delete") remove();
    else return;
    event.preventDefault();
  };
  if (renaming.value)
    return (
      <li class="conversation-row">
        <Rename title={title} onDone={done} />
      </li>
    );
  return (
    <li class={`conversation-row ${current ? "conversation-row-current" : ""}`} data-id={id}>
      <button
        type="button"
        class="conversation-open"
        ref={button}
        aria-current={current ? "page" : undefined}
        aria-keyshortcuts="F2 Delete"
        onClick={open}
        onKeyDown={onKeyDown}
        title={title}
      >
        <span class="conversation-title">{title}</span>
        <ConversationStatus id={id} />
      </button>
      <MenuButton
        class="tool conversation-menu"
        label={`Menu of ${title}`}
        note={chat.cacheCoverage.of(id)?.text}
        items={menuItems(chat, conversation, () => (renaming.value = true), remove)}
      >
        <More />
      </MenuButton>
    </li>
  );
}

function menuItems(
  chat: ReturnType<typeof useChat>,
  head: WireConversation,
  rename: () => void,
  remove: () => void,
): MenuItem[] {
  const { id } = head;
  const pinned = isPinned(head.metadata);
  const link = chat.conversations.linkOf(head);
  const copy = (url: string): MenuItem => ({
    label: "Copy the shared link",
    icon: <Copy />,
    run: () => void copyShareLink(chat, id, url),
  });
  const sharing: MenuItem[] =
    head.metadata?.share === undefined
      ? [{ label: "Share a link", icon: <Share />, line: true, run: () => void share(chat, id) }]
      : [
          { label: "Share a new link, end the old one", icon: <Share />, line: true, run: () => void share(chat, id) },
          ...(link === undefined ? [] : [copy(link)]),
          { label: "Stop sharing", icon: <Close />, run: () => void stopSharing(chat, id) },
        ];
  return [
    { label: "Rename", icon: <Edit />, keys: "F2", run: rename },
    { label: pinned ? "Unpin" : "Pin", icon: <Pin />, run: () => void chat.conversations.pin(id, !pinned) },
    { label: "Generate title", icon: <Spark />, run: () => void chat.autoTitler.suggest(id) },
    ...sharing,
    { label: "Export as JSON", icon: <Download />, line: true, run: () => void exportConversation(chat, id, "json") },
    { label: "Export as Markdown", icon: <Download />, run: () => void exportConversation(chat, id, "markdown") },
    { label: "Export as HTML", icon: <Download />, run: () => void exportConversation(chat, id, "html") },
    { label: "Delete", icon: <Trash />, keys: "Del", danger: true, line: true, run: remove },
  ];
}

/** Status dot: running response, unseen answer, or cache coverage. */
function ConversationStatus({ id }: { id: string }) {
  const chat = useChat();
  if (chat.isLive(id))
    return <span class="dot dot-live" role="img" aria-label="answer in progress" title="Answer in progress" />;
  if (chat.conversations.isUnseen(id))
    return <span class="dot dot-unseen" role="img" aria-label="new answer" title="New answer" />;
  const warm = chat.cacheCoverage.of(id);
  return warm ? <span class={`dot dot-${warm.level}`} role="img" aria-label={warm.text} title={warm.text} /> : null;
}

function Rename({ title, onDone }: { title: string; onDone: (name: string | null) => void }) {
  const input = useRef<HTMLInputElement>(null);
  const over = useRef(false);
  useLayoutEffect(() => {
    input.current?.focus(); // before the next key press
    input.current?.select();
  }, []);
  const end = (name: string | null) => {
    if (over.current) return; // removing the input triggers another blur
    over.current = true;
    onDone(name);
  };
  return (
    <input
      ref={input}
      class="text-input"
      aria-label="New title"
      maxLength={200}
      defaultValue={title}
      onBlur={(event) => end(event.currentTarget.value)}
      onKeyDown={(event) => {
        if (event.isComposing) return;
        event.stopPropagation();
        if (event.key === "Enter") end(event.currentTarget.value);
        if (event.key === "Escape") end(null);
      }}
    />
  );
}
