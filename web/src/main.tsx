import { effect } from "@preact/signals";
import { render } from "preact";
import { loadRenderer } from "./markdown/lazy";
import { Chat } from "./state/chat";
import { keepSettings } from "./state/settings";
import "./styles/index.css";
import { scrollToMessage } from "./ui/anchors";
import { App } from "./ui/App";
import { listenForKeys } from "./ui/keys";
import { keepPanel } from "./ui/panels";

const chat = new Chat();

/** The conversation in the address, and the message in it: `#conv_x/msg_y`. A reload and a bookmark find them again. */
function followAddress(): void {
  const [id = "", message] = decodeURIComponent(location.hash.slice(1)).split("/");
  if (message) scrollToMessage(message);
  if (id === (chat.thread.value.id.value ?? "")) return;
  if (id === "") chat.newConversation();
  else {
    void loadRenderer(); // while the messages come
    void chat.open(id);
  }
}

keepSettings();
keepPanel();
followAddress();
addEventListener("hashchange", followAddress);
effect(() => {
  const id = chat.thread.value.id.value;
  const hash = id === null ? "" : `#${id}`;
  if (location.hash.split("/")[0] !== hash) history[hash && location.hash ? "pushState" : "replaceState"](null, "", hash || location.pathname);
});
effect(() => {
  const id = chat.thread.value.id.value;
  const title = id === null ? null : chat.conversations.find(id)?.title;
  document.title = title ? `${title} · chatcache` : "chatcache";
});
listenForKeys(chat);
render(<App chat={chat} />, document.getElementById("app")!);
void chat.start();
