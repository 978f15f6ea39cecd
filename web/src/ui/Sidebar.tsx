// The conversations at the left: new, find, open. At its foot, what is being served and the theme.
import { useEffect } from "preact/hooks";
import { type Theme, theme } from "../state/settings";
import { ConversationList } from "./ConversationList";
import { useChat } from "./context";
import { Close, Download, Keyboard, Mark, Moon, More, Plus, Screen, Sun, Upload } from "./icons";
import { MenuButton } from "./MenuButton";
import { isNarrow, closeSidebarIfNarrow, sidebarOpen, togglePanel } from "./panels";
import { SearchHits } from "./SearchHits";

export function Sidebar() {
  const chat = useChat();
  const open = sidebarOpen.value;
  useEffect(() => {
    if (open) chat.cacheCoverage.scheduleRefresh();
    if (open && isNarrow()) document.querySelector<HTMLElement>(".side-close")?.focus();
  }, [open]);
  const begin = () => {
    chat.newConversation();
    closeSidebarIfNarrow();
  };
  return (
    <nav class="side" aria-label="Conversations" hidden={!open}>
      <div class="side-head">
        <span class="brand"><Mark /> chatcache</span>
        <span class="tools">
          <ListMenu />
          <button type="button" class="tool side-close" aria-label="Close the list" onClick={() => (sidebarOpen.value = false)}>
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
      const first = document.querySelector<HTMLElement>(".side-scroll .side-open");
      if (event.key === "Enter" && search.state.value === "done") first?.click();
      else first?.focus();
      event.preventDefault();
    }
  };
  return (
    <input
      id="find"
      class="find"
      type="search"
      placeholder="Find in all conversations"
      aria-label="Find in all conversations"
      autocomplete="off"
      maxLength={200}
      value={search.query.value}
      onInput={(event) => search.set(event.currentTarget.value)}
      onKeyDown={onKeyDown}
    />
  );
}

function ListMenu() {
  const chat = useChat();
  const pick = () => {
    const input = document.createElement("input");
    input.type = "file";
    input.multiple = true;
    input.accept = ".json,.jsonl,.ndjson,application/json";
    input.onchange = async () => {
      const { importFiles } = await import("../state/files");
      const id = await importFiles([...(input.files ?? [])], chat.conversations);
      if (id !== null) void chat.open(id);
    };
    input.click();
  };
  const exportAll = async () => (await import("../state/files")).exportConversations(null, "conversations");
  return (
    <MenuButton
      label="Import and export"
      items={[
        { label: "Import from files…", icon: <Upload />, run: pick },
        { label: "Export all as JSON", icon: <Download />, run: () => void exportAll() },
      ]}
    >
      <More />
    </MenuButton>
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
