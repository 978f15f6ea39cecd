// The page: sidebar, top bar, thread, composer, panels, toasts.

import { useLayoutEffect, useRef } from "preact/hooks";
import { announcement, dismiss, runAction, toasts } from "../app/notifications";
import type { Chat } from "../chat/chat";
import { Banner } from "./Banner";
import { Composer } from "./Composer";
import { ChatContext, useChat } from "./context";
import { DropZone, useFileDrop } from "./DropZone";
import { Beams, Cells, Close, Columns, Fork, Menu, PanelRight, Plus } from "./icons";
import { lazy } from "./lazy";
import {
  dialog,
  findOpen,
  focusComposer,
  lastSidePanel,
  PANEL_LABELS,
  paletteOpen,
  panel,
  type SidePanelName,
  sidebarOpen,
  sidePanel,
  togglePanel,
} from "./navigation";
import { Sidebar } from "./sidebar/Sidebar";
import { ThreadView } from "./thread/ThreadView";

const Settings = lazy(async () => (await import("./Settings")).Settings);
const Administration = lazy(async () => (await import("./Administration")).Administration);
const SavedPrompts = lazy(async () => (await import("./prompts/SavedPrompts")).SavedPrompts);
const Shortcuts = lazy(async () => (await import("./Shortcuts")).Shortcuts);
const Palette = lazy(
  async () => (await import("./Palette")).Palette,
  null,
  () => (paletteOpen.value = false),
);
const AlternativesPopover = lazy(async () => (await import("./thread/TokenView")).AlternativesPopover);
const Find = lazy(async () => (await import("./thread/Find")).Find);
const SidePanel = lazy(
  async () => (await import("./panels/SidePanel")).SidePanel,
  <aside class="panel side-panel" aria-label="Panel" aria-busy="true" />,
  () => (panel.value = null),
);

export function App({ chat }: { chat: Chat }) {
  return (
    <ChatContext.Provider value={chat}>
      <div class={`app ${sidebarOpen.value ? "app-sidebar" : ""} ${panelClass()}`}>
        <Sidebar />
        <button
          type="button"
          class="scrim"
          aria-label="Close the list"
          tabIndex={-1}
          onClick={() => (sidebarOpen.value = false)}
        />
        <main class="main">
          <TopBar />
          <Banner />
          {findOpen.value && <Find />}
          <ThreadView />
          <Composer />
          <DropZone name="attach" />
        </main>
        {panel.value === "settings" && <Settings />}
        {sidePanel.value !== null && <SidePanel />}
      </div>
      {dialog.value === "shortcuts" && <Shortcuts />}
      {dialog.value === "administration" && <Administration />}
      {dialog.value === "prompts" && <SavedPrompts />}
      {paletteOpen.value && <Palette />}
      {chat.forks.inspector.value && <AlternativesPopover />}
      <FileDrop />
      <Toasts />
      <p class="sr-only" role="status" id="status">
        {announcement.value}
      </p>
    </ChatContext.Provider>
  );
}

function FileDrop() {
  useFileDrop();
  return null;
}

function panelClass(): string {
  if (panel.value === "settings") return "app-panel";
  return sidePanel.value ? "app-panel app-wide-panel" : "";
}

function TopBar() {
  const chat = useChat();
  const id = chat.thread.value.id.value;
  const title = id === null ? null : chat.conversations.find(id)?.title;
  const empty = chat.thread.value.tree.value.path.value.length === 0;
  return (
    <header class="top-bar">
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
      {empty ? <span class="spacer" /> : <h1 class="top-title">{title ?? "New chat"}</h1>}
      <button type="button" class="tool top-new" aria-label="New chat" onClick={() => chat.newConversation()}>
        <Plus />
      </button>
      <PanelButtons />
    </header>
  );
}

const PANEL_BUTTONS: readonly { name: SidePanelName; icon: typeof Fork }[] = [
  { name: "candidates", icon: Columns },
  { name: "beams", icon: Beams },
  { name: "branches", icon: Fork },
  { name: "pages", icon: Cells },
];

function PanelButtons() {
  const searching = useChat().live.value?.beamTree.value ?? null;
  return (
    <>
      <div class="panel-buttons" role="group" aria-label="Panels">
        {PANEL_BUTTONS.map(({ name, icon: Icon }, index) => (
          <button
            key={name}
            type="button"
            class="tool"
            aria-label={PANEL_LABELS[name]}
            title={`${PANEL_LABELS[name]} (Alt+Shift+${index + 1})`}
            aria-pressed={panel.value === name}
            data-busy={name === "beams" && searching !== null ? true : undefined}
            onClick={() => togglePanel(name)}
          >
            <Icon />
          </button>
        ))}
      </div>
      <button
        type="button"
        class="tool panel-button"
        aria-label="Panel"
        onClick={() => togglePanel(lastSidePanel.value)}
      >
        <PanelRight />
      </button>
    </>
  );
}

function Toasts() {
  const box = useRef<HTMLDivElement>(null);
  const former = useRef<EventTarget | null>(null); // had the focus before
  const hadFocus = box.current?.contains(document.activeElement) ?? false;
  useLayoutEffect(() => {
    if (!hadFocus || document.activeElement !== document.body) return;
    if (former.current instanceof HTMLElement && former.current.isConnected) former.current.focus();
    else focusComposer();
  }, [toasts.value]);
  const onFocusIn = ({ relatedTarget }: FocusEvent) => {
    if (!box.current?.contains(relatedTarget as Node | null)) former.current = relatedTarget;
  };
  return (
    <div class="toasts" role="status" ref={box} onFocusIn={onFocusIn}>
      {toasts.value.map((toast) => (
        <div key={toast.id} class="toast">
          <span>{toast.text}</span>
          {toast.action && (
            <button type="button" class="link" onClick={() => runAction(toast)}>
              {toast.action.label}
            </button>
          )}
          <button type="button" class="tool" aria-label="Dismiss" onClick={() => dismiss(toast.id)}>
            <Close />
          </button>
        </div>
      ))}
    </div>
  );
}
