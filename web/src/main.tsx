import { effect } from "@preact/signals";
import { render } from "preact";
import { Chat } from "./state/chat";
import { keepSettings } from "./state/settings";
import "./styles/index.css";
import { App } from "./ui/App";
import { listenForKeys } from "./ui/keys";
import { keepPanel } from "./ui/panels";

const chat = new Chat();

/** The conversation in the address, so that a reload and a bookmark find it again. */
function followAddress(): void {
  const id = decodeURIComponent(location.hash.slice(1));
  if (id === (chat.thread.value.id.value ?? "")) return;
  if (id === "") chat.newConversation();
  else void chat.open(id);
}

keepSettings();
keepPanel();
followAddress();
addEventListener("hashchange", followAddress);
effect(() => {
  const id = chat.thread.value.id.value;
  const hash = id === null ? "" : `#${id}`;
  if (location.hash !== hash) history[hash && location.hash ? "pushState" : "replaceState"](null, "", hash || location.pathname);
});
effect(() => {
  const id = chat.thread.value.id.value;
  const title = id === null ? null : chat.conversations.find(id)?.title;
  document.title = title ? `${title} · chatcache` : "chatcache";
});
listenForKeys(chat);
render(<App chat={chat} />, document.getElementById("app")!);
void chat.start();
