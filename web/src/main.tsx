import { effect } from "@preact/signals";
import { render } from "preact";
import { watchWake } from "./api/socket";
import { registerServiceWorker } from "./app/browser";
import { persistSettings } from "./app/settings";
import { syncAddress } from "./chat/address";
import { Chat } from "./chat/chat";
import { loadRenderer } from "./markdown/textStream";
import { App } from "./ui/App";
import { listenForShortcuts } from "./ui/commands";
import { persistPanel, scrollToMessage } from "./ui/navigation";
import { trackPanelHistory } from "./ui/panelHistory";
import "./styles/index.css";

const chat = new Chat();

persistSettings();
persistPanel();
trackPanelHistory(chat);
syncAddress(chat, { onOpen: () => void loadRenderer(), onMessage: scrollToMessage });
effect(() => {
  const id = chat.thread.value.id.value;
  const title = id === null ? null : chat.conversations.find(id)?.title;
  document.title = title ? `${title} · chatcache` : "chatcache";
});
listenForShortcuts(chat);
render(<App chat={chat} />, document.getElementById("app")!);
watchWake(() => chat.socket.reconnect());
chat.readiness.pollPeriodically();
void chat.start();
registerServiceWorker();
