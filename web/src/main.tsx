import { effect } from "@preact/signals";
import { render } from "preact";
import { loadRenderer } from "./markdown/lazy";
import { syncAddress } from "./state/address";
import { Chat } from "./state/chat";
import { persistSettings } from "./state/settings";
import { watchWake } from "./state/sleep";
import "./styles/index.css";
import { scrollToMessage } from "./ui/anchors";
import { App } from "./ui/App";
import { listenForShortcuts } from "./ui/keys";
import { persistPanel } from "./ui/panels";

const chat = new Chat();

persistSettings();
persistPanel();
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
