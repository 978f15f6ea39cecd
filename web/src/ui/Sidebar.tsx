// The conversations at the left: new, find, open, rename, delete. At its foot, what is being served and the theme.
import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { type Theme, theme } from "../state/settings";
import type { WireConversation } from "../wire/frames";
import { useChat } from "./context";
import { Close, Edit, Keyboard, Mark, Moon, Plus, Screen, Sun, Trash } from "./icons";
import { isNarrow, sidebarOpen, togglePanel } from "./panels";

export function Sidebar() {
  const chat = useChat();
  const list = chat.conversations;
  const shown = list.shown.value;
  const begin = () => {
    chat.newConversation();
    if (isNarrow()) sidebarOpen.value = false;
  };
  return (
    <nav class="side" aria-label="Conversations" hidden={!sidebarOpen.value}>
      <div class="side-head">
        <span class="brand"><Mark /> chatcache</span>
        <button type="button" class="tool side-close" aria-label="Close the list" onClick={() => (sidebarOpen.value = false)}>
          <Close />
        </button>
      </div>
      <button type="button" class="button new-chat" onClick={begin} title="New chat (Ctrl+Shift+O)">
        <Plus /> New chat
      </button>
      <input
        id="find"
        class="find"
        type="search"
        placeholder="Find a conversation"
        aria-label="Find a conversation"
        onInput={(event) => (list.filter.value = event.currentTarget.value)}
      />
      <ul class="side-list">
        {shown.map((conversation) => (
          <Row key={conversation.id} conversation={conversation} />
        ))}
      </ul>
      {list.state.value === "ready" && shown.length === 0 && (
        <p class="side-empty">{list.filter.value ? "Nothing of that name." : "Your conversations will be listed here."}</p>
      )}
      {list.state.value === "failed" && (
        <p class="side-empty">
          The list did not load. <button type="button" class="link" onClick={() => void list.refresh()}>Try again</button>
        </p>
      )}
      {list.more.value && (
        <button type="button" class="link side-more" onClick={() => void list.loadMore()}>Older conversations</button>
      )}
      <Foot />
    </nav>
  );
}

function Row({ conversation }: { conversation: WireConversation }) {
  const chat = useChat();
  const renaming = useSignal(false);
  const current = chat.thread.value.id.value === conversation.id;
  const title = conversation.title ?? "Untitled";
  const open = () => {
    void chat.open(conversation.id);
    if (isNarrow()) sidebarOpen.value = false;
  };
  if (renaming.value) {
    const done = (name: string | null) => {
      renaming.value = false;
      if (name !== null) void chat.conversations.rename(conversation.id, name.trim());
    };
    return <li class="side-row"><Rename title={title} onDone={done} /></li>;
  }
  return (
    <li class={`side-row ${current ? "side-row-current" : ""}`}>
      <button type="button" class="side-open" aria-current={current ? "page" : undefined} onClick={open} title={title}>
        <span class="side-title">{title}</span>
        {chat.isLive(conversation.id) && <span class="dot dot-live" role="img" aria-label="writing" />}
      </button>
      <span class="side-tools">
        <button type="button" class="tool" aria-label={`Rename ${title}`} onClick={() => (renaming.value = true)}><Edit /></button>
        <button type="button" class="tool" aria-label={`Delete ${title}`} onClick={() => chat.remove(conversation.id)}><Trash /></button>
      </span>
    </li>
  );
}

function Rename({ title, onDone }: { title: string; onDone: (name: string | null) => void }) {
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => input.current?.select(), []);
  return (
    <input
      ref={input}
      class="find"
      aria-label="New title"
      maxLength={200}
      defaultValue={title}
      onBlur={(event) => onDone(event.currentTarget.value)}
      onKeyDown={(event) => {
        if (event.key === "Enter") onDone(event.currentTarget.value);
        if (event.key === "Escape") onDone(null);
      }}
    />
  );
}

const THEMES: readonly { name: Theme; label: string; icon: typeof Sun }[] = [
  { name: "light", label: "Light theme", icon: Sun },
  { name: "system", label: "System theme", icon: Screen },
  { name: "dark", label: "Dark theme", icon: Moon },
];

function Foot() {
  const chat = useChat();
  const model = chat.session.value?.model;
  const state = chat.socket.state.value;
  return (
    <div class="side-foot">
      <span class="served" title={model}>
        <span class={`dot ${state === "open" ? "dot-on" : "dot-off"}`} aria-hidden="true" />
        <span class="side-title">{state === "open" ? (model ?? "connected") : "not connected"}</span>
      </span>
      <span class="themes" role="group" aria-label="Theme">
        {THEMES.map(({ name, label, icon: Icon }) => (
          <button
            key={name}
            type="button"
            class="tool"
            aria-label={label}
            title={label}
            aria-pressed={theme.value === name}
            onClick={() => (theme.value = name)}
          >
            <Icon />
          </button>
        ))}
      </span>
      <button type="button" class="tool" aria-label="Keyboard shortcuts" title="Keyboard shortcuts (Ctrl+/)" onClick={() => togglePanel("shortcuts")}>
        <Keyboard />
      </button>
    </div>
  );
}
