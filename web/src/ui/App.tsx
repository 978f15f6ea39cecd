// The page: list, thread, composer, and whichever panel is open.
import type { Chat } from "../state/chat";
import { announcement } from "../state/announcer";
import { AlternativesPopover } from "./Alternatives";
import { Banner } from "./Banner";
import { Composer } from "./Composer";
import { ChatContext, useChat } from "./context";
import { DropZone } from "./DropZone";
import { Menu, Plus } from "./icons";
import { lazy } from "./late";
import { panel, sidePanel, sidebarOpen } from "./panels";
import { Sidebar } from "./Sidebar";
import { PanelButtons } from "./SideButtons";
import { SideDoor } from "./SideDoor";
import { ThreadView } from "./ThreadView";
import { Toasts } from "./Toasts";

const Settings = lazy(async () => (await import("./Settings")).Settings);
const Shortcuts = lazy(async () => (await import("./Shortcuts")).Shortcuts);

export function App({ chat }: { chat: Chat }) {
  return (
    <ChatContext.Provider value={chat}>
      <div class={`app ${sidebarOpen.value ? "app-side" : ""} ${panel.value === "settings" ? "app-panel" : sidePanel.value ? "app-panel app-wide" : ""}`}>
        <Sidebar />
        <button type="button" class="scrim" aria-label="Close the list" tabIndex={-1} onClick={() => (sidebarOpen.value = false)} />
        <main class="main">
          <TopBar />
          <Banner />
          <ThreadView />
          <Composer />
        </main>
        {panel.value === "settings" && <Settings />}
        <SideDoor />
      </div>
      {panel.value === "shortcuts" && <Shortcuts />}
      <AlternativesPopover />
      <DropZone />
      <Toasts />
      <p class="sr-only" role="status" id="status">{announcement.value}</p>
    </ChatContext.Provider>
  );
}

function TopBar() {
  const chat = useChat();
  const id = chat.thread.value.id.value;
  const title = id === null ? null : chat.conversations.find(id)?.title;
  const empty = chat.thread.value.tree.value.path.value.length === 0;
  return (
    <header class="top">
      <button
        type="button"
        class="tool"
        aria-label={sidebarOpen.value ? "Hide the list" : "Show the list"}
        title="Conversations (Ctrl+Shift+S)"
        aria-expanded={sidebarOpen.value}
        onClick={() => (sidebarOpen.value = !sidebarOpen.value)}
      >
        <Menu />
      </button>
      {empty ? <span class="grow" /> : <h1 class="top-title">{title ?? "New chat"}</h1>}
      <button type="button" class="tool top-new" aria-label="New chat" onClick={() => chat.newConversation()}>
        <Plus />
      </button>
      <PanelButtons />
    </header>
  );
}
