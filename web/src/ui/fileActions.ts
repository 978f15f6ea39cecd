// Import, export and sharing of conversations from menus and commands. The program for it is loaded when it is used.

import type { ExportFormat } from "../api/rest";
import type { Chat } from "../chat/chat";

const load = () => import("../conversations/importExport");

export function importFromPicker(chat: Chat): void {
  const input = document.createElement("input");
  input.type = "file";
  input.multiple = true;
  input.accept = ".json,.jsonl,.ndjson,application/json";
  input.onchange = () => importAll(chat, [...(input.files ?? [])]);
  input.click();
}

export async function importAll(chat: Chat, files: readonly File[]): Promise<void> {
  const { importFiles } = await load();
  const id = await importFiles(files, chat.conversations);
  if (id !== null) void chat.open(id);
}

export async function exportAll(): Promise<void> {
  await (await load()).exportConversations(null, "conversations");
}

/** The branch on the screen, if the conversation is shown. */
function shownLeaf(chat: Chat, id: string): string | undefined {
  const isShown = chat.thread.value.id.value === id;
  return (isShown && chat.thread.value.tree.value.leaf.value?.id.value) || undefined;
}

export async function exportConversation(chat: Chat, id: string, format: ExportFormat): Promise<void> {
  const title = chat.conversations.find(id)?.title || "Untitled";
  const leaf = format === "json" ? undefined : shownLeaf(chat, id);
  await (await load()).exportConversations(id, title, format, leaf);
}

export async function share(chat: Chat, id: string): Promise<void> {
  const leaf = shownLeaf(chat, id);
  await (await load()).shareConversation(id, chat.conversations, leaf);
}

export async function copyShareLink(chat: Chat, id: string, link: string): Promise<void> {
  await (await load()).copyLink(id, link, chat.conversations);
}

export async function stopSharing(chat: Chat, id: string): Promise<void> {
  await (await load()).endShare(id, chat.conversations);
}
