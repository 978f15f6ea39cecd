// Import and export of conversations as files.

import * as rest from "../api/rest";
import { copyText } from "../app/browser";
import { toast } from "../app/notifications";
import type { Conversations } from "./conversations";

const EXTENSIONS: Readonly<Record<rest.ExportFormat, string>> = { json: "json", markdown: "md", html: "html" };
const MAX_NAME_CHARS = 60;

/** Download one conversation; with `id` null all of them, as one JSON object per line. */
export async function exportConversations(
  id: string | null,
  title: string,
  format: rest.ExportFormat = "json",
  branch?: string,
): Promise<void> {
  try {
    const ending = id === null ? "jsonl" : EXTENSIONS[format];
    downloadBlob(await rest.exportFile(id, format, branch), `${toFileName(title)}.${ending}`);
  } catch (error) {
    toast(`Not exported. ${(error as Error).message}`);
  }
}

/** Make a link to one branch and copy it; whoever has it can read the branch without signing in. */
export async function shareConversation(id: string, conversations: Conversations, leaf?: string): Promise<void> {
  try {
    const share = await rest.shareConversation(id, leaf);
    const link = new URL(share.path, location.origin).href;
    conversations.rememberLink(share.conversation, link);
    conversations.applyOwnChange(share.conversation);
    await copyLink(id, link, conversations);
  } catch (error) {
    toast(`Not shared. ${(error as Error).message}`);
  }
}

export async function copyLink(id: string, link: string, conversations: Conversations): Promise<void> {
  const copied = await copyText(link);
  const stop = { label: "Stop sharing", run: () => void endShare(id, conversations) };
  toast(copied ? "Link copied. Everyone who has it can read this branch." : `Link: ${link}`, stop);
}

export async function endShare(id: string, conversations: Conversations): Promise<void> {
  try {
    await conversations.trackOwnChange(rest.endShare(id));
    toast("The link has ended.");
  } catch (error) {
    toast(`Still shared. ${(error as Error).message}`);
  }
}

/** Import files exported by this server or by another chat program. Returns the id if exactly one was imported. */
export async function importFiles(files: readonly File[], conversations: Conversations): Promise<string | null> {
  const imported: string[] = [];
  const messages: string[] = [];
  for (const file of files) {
    if (/\.zip$/i.test(file.name)) {
      messages.push(`${file.name}: unpack it first, conversations.json is inside.`);
      continue;
    }
    try {
      const report = await rest.importFile(
        file,
        /\.(jsonl|ndjson)$/i.test(file.name) ? "application/x-ndjson" : "application/json",
      );
      imported.push(
        ...report.data
          .filter(({ status }) => status === "created" || status === "extended")
          .flatMap(({ id }) => id ?? []),
      );
      messages.push(summarizeImport(report));
    } catch (error) {
      messages.push(describeFailure(file.name, error as Error));
    }
  }
  if (imported.length > 0) await conversations.refresh();
  if (messages.length > 0) toast(messages.join(" "));
  return imported.length === 1 ? imported[0]! : null;
}

const OTHER_CONTENT = /not valid JSON|not a conversation/; // in the server's message

/** Describe in plain words why a file was not imported. */
export function describeFailure(name: string, error: Error): string {
  const isOther = error instanceof rest.RequestError && error.status === 400 && OTHER_CONTENT.test(error.message);
  return isOther
    ? `${name} was not imported: it is not a conversation export.`
    : `${name} was not imported. ${error.message}`;
}

export function summarizeImport(report: rest.ImportReport): string {
  const counts = [
    [report.created, "imported"],
    [report.extended, "extended"],
    [report.unchanged, "already here"],
    [report.failed, "failed"],
  ] as const;
  const words = counts.filter(([count]) => count > 0).map(([count, word]) => `${count} ${word}`);
  const why = report.data.find(({ error }) => error)?.error?.message;
  return `Conversations: ${words.join(", ") || "none in the file"}.${why ? ` ${why}` : ""}`;
}

/** Turn a title into a file name that is valid on every system. */
export function toFileName(title: string): string {
  const plain = title
    .replace(/[\p{Cc}\\/:*?"<>|]+/gu, " ")
    .replace(/\s+/g, " ")
    .trim()
    .replace(/^\.+|\.+$/g, "");
  return [...plain].slice(0, MAX_NAME_CHARS).join("").trim() || "conversation";
}

function downloadBlob(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // the download may still be reading it
}
