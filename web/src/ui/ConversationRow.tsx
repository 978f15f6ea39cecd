// One conversation in the list: open it, see whether it is warm or being written, rename it in place, its menu.
import { useSignal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { isPinned } from "../state/metadata";
import type { WireConversation } from "../wire/frames";
import type { ExportFormat } from "../wire/rest";
import { useChat } from "./context";
import { Download, Edit, More, Pin, Spark, Trash } from "./icons";
import { MenuButton, type MenuItem } from "./MenuButton";
import { closeSidebarIfNarrow } from "./panels";

export function ConversationRow({ conversation }: { conversation: WireConversation }) {
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
    setTimeout(() => button.current?.focus()); // the row is there again
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "F2") renaming.value = true;
    else if (event.key === "Delete") chat.remove(id);
    else return;
    event.preventDefault();
  };
  if (renaming.value) return <li class="side-row"><Rename title={title} onDone={done} /></li>;
  return (
    <li class={`side-row ${current ? "side-row-current" : ""}`} data-id={id}>
      <button
        type="button"
        class="side-open"
        ref={button}
        aria-current={current ? "page" : undefined}
        aria-keyshortcuts="F2 Delete"
        onClick={open}
        onKeyDown={onKeyDown}
        title={title}
      >
        <span class="side-title">{title}</span>
        <ConversationStatus id={id} />
      </button>
      <MenuButton
        class="tool side-menu"
        label={`Menu of ${title}`}
        note={chat.cacheCoverage.of(id)?.text}
        items={menuItems(chat, conversation, title, () => (renaming.value = true))}
      >
        <More />
      </MenuButton>
    </li>
  );
}

function menuItems(chat: ReturnType<typeof useChat>, head: WireConversation, title: string, rename: () => void): MenuItem[] {
  const { id } = head;
  const pinned = isPinned(head.metadata);
  const save = async (format: ExportFormat) => (await import("../state/files")).exportConversations(id, title, format);
  return [
    { label: "Rename", icon: <Edit />, keys: "F2", run: rename },
    { label: pinned ? "Unpin" : "Pin", icon: <Pin />, run: () => void chat.conversations.pin(id, !pinned) },
    { label: "Let the model name it", icon: <Spark />, run: () => void chat.autoTitler.suggest(id) },
    { label: "Export as JSON", icon: <Download />, line: true, run: () => void save("json") },
    { label: "Export as Markdown", icon: <Download />, run: () => void save("markdown") },
    { label: "Delete", icon: <Trash />, keys: "Del", danger: true, line: true, run: () => chat.remove(id) },
  ];
}

/** What goes on in it: being written, answered meanwhile, or how warm it is. */
function ConversationStatus({ id }: { id: string }) {
  const chat = useChat();
  if (chat.isLive(id)) return <span class="dot dot-live" role="img" aria-label="being written" title="Being written" />;
  if (chat.conversations.isUnseen(id)) return <span class="dot dot-unseen" role="img" aria-label="new answer" title="New answer" />;
  const warm = chat.cacheCoverage.of(id);
  return warm ? <span class={`dot dot-${warm.level}`} role="img" aria-label={warm.text} title={warm.text} /> : null;
}

function Rename({ title, onDone }: { title: string; onDone: (name: string | null) => void }) {
  const input = useRef<HTMLInputElement>(null);
  const over = useRef(false);
  useLayoutEffect(() => {
    input.current?.focus(); // before the next key
    input.current?.select();
  }, []);
  const end = (name: string | null) => {
    if (over.current) return; // what is taken out of the page loses the focus once more
    over.current = true;
    onDone(name);
  };
  return (
    <input
      ref={input}
      class="find"
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
