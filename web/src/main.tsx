import { effect } from "@preact/signals";
import { render } from "preact";
import { loadRenderer } from "./markdown/lazy";
import { keepAddress } from "./state/address";
import { Chat } from "./state/chat";
import { keepSettings } from "./state/settings";
import { watchSleep } from "./state/sleep";
import "./styles/index.css";
import { scrollToMessage } from "./ui/anchors";
import { App } from "./ui/App";
import { listenForKeys } from "./ui/keys";
import { keepPanel } from "./ui/panels";

const chat = new Chat();

keepSettings();
keepPanel();
keepAddress(chat, { opening: () => void loadRenderer(), message: scrollToMessage });
effect(() => {
  const id = chat.thread.value.id.value;
  const title = id === null ? null : chat.conversations.find(id)?.title;
  document.title = title ? `${title} · chatcache` : "chatcache";
});
listenForKeys(chat);
render(<App chat={chat} />, document.getElementById("app")!);
watchSleep(() => chat.socket.renew());
chat.readiness.keepWatch();
void chat.start();
