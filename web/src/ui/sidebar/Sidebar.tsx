// Sidebar: new chat, search, conversation list, and the footer with model name and theme.

import { useEffect, useLayoutEffect } from "preact/hooks";
import type { SearchHit, TextRange } from "../../api/rest";
import { type Theme, theme } from "../../app/settings";
import { splitAtMarks } from "../../conversations/search";
import { useChat } from "../context";
import { DropZone } from "../DropZone";
import { Close, Keyboard, Mark, Moon, Plus, Screen, Sun } from "../icons";
import { closeSidebarIfNarrow, isNarrow, scrollToMessage, sidebarOpen, toggleDialog } from "../navigation";
import { ConversationList, LoadMore, moveBetweenRows } from "./ConversationList";
import { ImportExportMenu } from "./ImportExport";

export function Sidebar() {
  const chat = useChat();
  const open = sidebarOpen.value;
  useEffect(() => {
    if (open) chat.cacheCoverage.scheduleRefresh();
  }, [open]);
  useLayoutEffect(() => {
    if (open && isNarrow()) document.querySelector<HTMLElement>(".sidebar-close")?.focus();
  }, [open]);
  const begin = () => {
    chat.newConversation();
    closeSidebarIfNarrow();
  };
  return (
    <nav class="sidebar" aria-label="Conversations" hidden={!open}>
      <div class="sidebar-head">
        <span class="brand">
          <Mark /> chatcache
        </span>
        <span class="tools">
          <ImportExportMenu />
          <button
            type="button"
            class="tool sidebar-close"
            aria-label="Close the list"
            onClick={() => (sidebarOpen.value = false)}
          >
            <Close />
          </button>
        </span>
      </div>
      <button type="button" class="button new-chat" onClick={begin} title="New chat (Ctrl+Shift+O)">
        <Plus /> New chat
      </button>
      <SearchBox />
      {chat.search.state.value === "idle" ? <ConversationList /> : <SearchHits />}
      <SidebarFooter />
      <DropZone name="import" />
    </nav>
  );
}

function SearchBox() {
  const { search } = useChat();
  const onKeyDown = (event: KeyboardEvent & { currentTarget: HTMLInputElement }) => {
    if (event.isComposing) return;
    if (event.key === "Escape" && search.query.value !== "") {
      event.stopPropagation();
      search.set("");
    } else if (event.key === "ArrowDown" || event.key === "Enter") {
      const first = document.querySelector<HTMLElement>(".list-scroll .conversation-open");
      if (event.key === "Enter" && search.state.value === "done") first?.click();
      else first?.focus();
      event.preventDefault();
    }
  };
  return (
    <input
      id="find"
      class="text-input"
      type="search"
      placeholder="Search all conversations"
      aria-label="Search all conversations"
      autocomplete="off"
      maxLength={200}
      value={search.query.value}
      onInput={(event) => search.set(event.currentTarget.value)}
      onKeyDown={onKeyDown}
    />
  );
}

const THEMES: readonly { name: Theme; label: string; icon: typeof Sun }[] = [
  { name: "light", label: "Light theme", icon: Sun },
  { name: "system", label: "System theme", icon: Screen },
  { name: "dark", label: "Dark theme", icon: Moon },
];

function SidebarFooter() {
  const chat = useChat();
  const model = chat.session.value?.model;
  const isOpen = chat.socket.state.value === "open";
  const label = isOpen ? "Connected to the server" : "No connection to the server";
  return (
    <div class="sidebar-foot">
      <span class="model-status" title={model}>
        <span class={`dot ${isOpen ? "dot-on" : "dot-off"}`} role="img" aria-label={label} title={label} />
        <span class="conversation-title">{isOpen ? (model ?? "connected") : "not connected"}</span>
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
      <button
        type="button"
        class="tool"
        aria-label="Keyboard shortcuts"
        title="Keyboard shortcuts (Ctrl+/)"
        onClick={() => toggleDialog("shortcuts")}
      >
        <Keyboard />
      </button>
    </div>
  );
}

// -- Search results: titles and snippets with the terms marked; a hit opens at its message

function SearchHits() {
  const chat = useChat();
  const { search } = chat;
  const hits = search.hits.value.filter(({ id }) => !chat.conversations.isPendingDelete(id));
  return (
    <div class="list-scroll" onKeyDown={moveBetweenRows} aria-busy={search.state.value === "looking"}>
      {hits.length > 0 && (
        <ul class="list-items" aria-label="Found">
          {hits.map((hit) => (
            <HitRow key={hit.id} hit={hit} />
          ))}
        </ul>
      )}
      {search.state.value === "done" && hits.length === 0 && (
        <p class="list-empty">No results in titles or messages.</p>
      )}
      {search.state.value === "failed" && <p class="list-empty">The search failed. Change the query to try again.</p>}
      {search.state.value === "done" && search.hasMore.value && <LoadMore onWanted={() => search.loadMore()} />}
    </div>
  );
}

function HitRow({ hit }: { hit: SearchHit }) {
  const chat = useChat();
  const { snippet, item_id, role, title_marks } = hit.match;
  const title = hit.title || "Untitled";
  const current = chat.thread.value.id.value === hit.id;
  const open = async () => {
    closeSidebarIfNarrow();
    await chat.open(hit.id);
    if (item_id !== null && chat.thread.value.id.value === hit.id) scrollToMessage(item_id);
  };
  return (
    <li class={`conversation-row ${current ? "conversation-row-current" : ""}`} data-id={hit.id}>
      <button type="button" class="conversation-open search-hit" onClick={() => void open()}>
        <span class="conversation-title">
          <MarkedText text={title} marks={title_marks} />
        </span>
        {snippet && (
          <span class="search-snippet">
            <span class="search-role">{role === "user" ? "You" : "Answer"}: </span>
            <MarkedText text={snippet.text} marks={snippet.marks} />
          </span>
        )}
      </button>
    </li>
  );
}

function MarkedText({ text, marks }: { text: string; marks: readonly TextRange[] }) {
  return (
    <>
      {splitAtMarks(text, marks).map((piece, index) =>
        piece.marked ? <mark key={index}>{piece.text}</mark> : piece.text,
      )}
    </>
  );
}
