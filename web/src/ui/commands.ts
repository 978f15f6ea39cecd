// All commands of the page with their keys: for the key handler, the list of shortcuts and the command palette.

import { signOut } from "../api/rest";
import { pendingUndo, toast } from "../app/notifications";
import { type Theme, theme } from "../app/settings";
import type { Chat } from "../chat/chat";
import type { Message } from "../chat/tree";
import type { Turn } from "../chat/turn";
import { isPinned } from "../conversations/metadata";
import { exportAll, exportConversation, importFromPicker, share, stopSharing } from "./fileActions";
import {
  comparedAnswer,
  findOpen,
  focusComposer,
  isNarrow,
  PANEL_LABELS,
  paletteOpen,
  panel,
  removeConversation,
  SIDE_PANELS,
  sidebarOpen,
  sidePanel,
  toggleDialog,
  togglePanel,
  toggleSidePanel,
} from "./navigation";

export interface Command {
  readonly label: string;
  readonly keys?: string;
  readonly matches?: (event: KeyboardEvent) => boolean;
  /** Whether the command does something now; without it: always. `event` is null in the palette. */
  readonly applies?: (chat: Chat, event: KeyboardEvent | null) => boolean;
  readonly run?: (chat: Chat, event: KeyboardEvent | null) => unknown;
  readonly keysOnly?: boolean; // not in the palette: the key or the focus says what it acts on
}

const hasControl = (event: KeyboardEvent) => event.ctrlKey || event.metaKey;
/** Whether the focus is in a text: there Ctrl+Z undoes typing, and Alt and Option move the caret or type other letters. */
const isInText = ({ target }: Event) =>
  (target instanceof HTMLInputElement || target instanceof HTMLTextAreaElement) && target.value !== "";
const control = (code: string) => (event: KeyboardEvent) => hasControl(event) && !event.shiftKey && event.code === code;
const controlShift = (code: string) => (event: KeyboardEvent) =>
  hasControl(event) && event.shiftKey && event.code === code;
const controlSign = (sign: string) => (event: KeyboardEvent) => hasControl(event) && event.key === sign;
const altKey = (key: string) => (event: KeyboardEvent) => event.altKey && !hasControl(event) && event.key === key;
const altLetter = (code: string) => (event: KeyboardEvent) =>
  event.altKey && !event.shiftKey && !hasControl(event) && event.code === code;
const altDigit = (event: KeyboardEvent) => (/^Digit[1-8]$/.test(event.code) ? Number(event.code.slice(5)) : 0);
const isEscape = (event: KeyboardEvent) => event.key === "Escape" && !event.shiftKey;

const shownId = (chat: Chat) => chat.thread.value.id.value;
const shownHead = (chat: Chat) => chat.conversations.find(shownId(chat) ?? "");
const isStored = (chat: Chat) => shownId(chat) !== null;
const isUnlocked = (chat: Chat) => chat.conversations.state.value !== "locked";
const leafOf = (chat: Chat) => chat.thread.value.tree.value.leaf.value;

/** The version `step` places after the last answer or message. */
function otherVersion(chat: Chat, step: number): Message | undefined {
  const leaf = leafOf(chat);
  if (!leaf) return undefined;
  const siblings = chat.thread.value.tree.value.versions(leaf);
  return siblings[siblings.indexOf(leaf) + step];
}

/** The conversation `step` places below the shown one in the list. */
function otherConversation(chat: Chat, step: number): string | undefined {
  const listed = chat.conversations.groups.value.flatMap(({ conversations }) => conversations);
  const at = listed.findIndex(({ id }) => id === shownId(chat));
  return (at < 0 ? listed[0] : listed[at + step])?.id;
}

function lastAnswer(chat: Chat): Message | null {
  const leaf = leafOf(chat);
  return leaf?.role === "assistant" ? leaf : null;
}

/** The last answer if it is shown alone, and nothing runs: the form to compare settings opens below it. */
function comparableAnswer(chat: Chat): Message | null {
  const answer = lastAnswer(chat);
  const thread = chat.thread.value;
  if (!answer || thread.live.value || !thread.questionOf(answer) || thread.comparedWith(answer)) return null;
  const turn = lastTurn(chat);
  return turn && turn.candidates.length > 1 && turn.showsCandidates.value ? null : answer;
}

function lastTurn(chat: Chat): Turn | undefined {
  const leaf = leafOf(chat);
  return leaf ? chat.thread.value.turnOf(leaf) : undefined;
}

function candidateOf(chat: Chat, event: KeyboardEvent | null): Message | undefined {
  const leaf = leafOf(chat);
  const candidates = (leaf && chat.thread.value.comparedWith(leaf)) ?? lastTurn(chat)?.candidates ?? [];
  return event && candidates.length > 1 ? candidates[altDigit(event) - 1] : undefined;
}

const focusedDrop = () => document.activeElement?.closest(".card")?.querySelector<HTMLElement>(".card-drop");
const hidesSidebar = () => isNarrow() && sidebarOpen.value;

export async function leaveSession({ auth }: Chat): Promise<void> {
  await signOut().then(
    () => auth.leave(),
    () => toast("Signing out failed: the server is unreachable."),
  );
}

/** Show the search over all conversations, with a query if given. */
export function searchConversations(chat: Chat, query?: string): void {
  if (query !== undefined) chat.search.set(query);
  const focus = () => document.getElementById("find")?.focus();
  if (sidebarOpen.value)
    focus(); // immediately: the next key is typed into the box
  else {
    sidebarOpen.value = true;
    setTimeout(focus);
  }
}

const themeCommand = (name: Theme, label: string): Command => ({
  label,
  applies: () => theme.value !== name,
  run: () => (theme.value = name),
});

const exportCommand = (format: "json" | "markdown" | "html", label: string): Command => ({
  label: `Export this conversation as ${label}`,
  applies: isStored,
  run: (chat) => exportConversation(chat, shownId(chat)!, format),
});

export const COMMANDS: readonly Command[] = [
  { keys: "Enter", label: "Send" },
  { keys: "Shift+Enter", label: "New line" },
  { keys: "Alt+Enter", label: "Send after the running answer (Enter: stop it, and send now)" },
  { keys: "↑", label: "Edit the last message (from an empty message box)" },
  {
    keys: "Ctrl+K",
    label: "All commands, and conversations by title",
    matches: control("KeyK"),
    run: () => (paletteOpen.value = !paletteOpen.value),
    keysOnly: true,
  },
  { keys: "Ctrl+Shift+O", label: "New chat", matches: controlShift("KeyO"), run: (chat) => chat.newConversation() },
  {
    keys: "Esc",
    label: "Close a panel",
    matches: isEscape,
    applies: (chat) => hidesSidebar() || panel.value === "settings" || (sidePanel.value !== null && !chat.live.value),
    run: () => {
      if (hidesSidebar()) sidebarOpen.value = false;
      else panel.value = null;
      focusComposer();
    },
    keysOnly: true,
  },
  {
    keys: "Esc",
    label: "Stop the answer",
    matches: isEscape,
    applies: (chat) => chat.live.value !== null,
    run: (chat) => chat.stop(),
  },
  {
    label: "Regenerate the last answer",
    applies: (chat) => lastAnswer(chat) !== null && chat.live.value === null,
    run: (chat) => chat.regenerate(lastAnswer(chat)!),
  },
  {
    keys: "Alt+C",
    label: "Compare settings of the last answer…",
    matches: altLetter("KeyC"),
    applies: (chat) => comparableAnswer(chat) !== null,
    run: (chat) => (comparedAnswer.value = comparableAnswer(chat)),
  },
  ...[-1, 1].map(
    (step): Command => ({
      keys: step < 0 ? "Alt+←" : "Alt+→",
      label: step < 0 ? "Previous version of the last answer" : "Next version of the last answer",
      matches: altKey(step < 0 ? "ArrowLeft" : "ArrowRight"),
      applies: (chat, event) => (event ? leafOf(chat) !== null : otherVersion(chat, step) !== undefined),
      run: (chat) => {
        const target = otherVersion(chat, step);
        if (target) chat.choose(target);
      },
    }),
  ),
  {
    keys: "Alt+B",
    label: "Show the tokens of the last answer with their confidence",
    matches: altLetter("KeyB"),
    applies: (chat) => lastAnswer(chat) !== null && chat.forks.canOpen(lastAnswer(chat)!),
    run: (chat) => chat.forks.open(lastAnswer(chat)!),
  },
  {
    keys: "Alt+1 … 8",
    label: "Pick a candidate",
    matches: (event) => event.altKey && !event.shiftKey && !hasControl(event) && altDigit(event) > 0,
    applies: (chat, event) => candidateOf(chat, event) !== undefined,
    run: (chat, event) => {
      chat.pick(candidateOf(chat, event)!);
      focusComposer();
    },
    keysOnly: true,
  },
  {
    keys: "Alt+Del",
    label: "Drop the focused candidate while it is generated",
    matches: (event) => event.altKey && event.key === "Delete",
    applies: () => focusedDrop() != null,
    run: () => focusedDrop()?.click(),
    keysOnly: true,
  },
  {
    keys: "Ctrl+F",
    label: "Find in this conversation, on all branches",
    matches: control("KeyF"), // pressed again, it is the browser's search
    applies: (chat) => !findOpen.value && chat.thread.value.tree.value.path.value.length > 0,
    run: () => (findOpen.value = true),
  },
  {
    keys: "Ctrl+Shift+F",
    label: "Search all conversations",
    matches: controlShift("KeyF"),
    applies: isUnlocked,
    run: (chat) => searchConversations(chat),
  },
  ...SIDE_PANELS.map(
    (name, index): Command => ({
      keys: `Alt+Shift+${index + 1}`,
      label: `${PANEL_LABELS[name]} panel`,
      matches: (event) => event.altKey && event.shiftKey && !hasControl(event) && altDigit(event) === index + 1,
      run: () => togglePanel(name),
    }),
  ),
  { keys: "Ctrl+.", label: "Show or hide the panel", matches: controlSign("."), run: toggleSidePanel },
  {
    keys: "Ctrl+Shift+S",
    label: "Show or hide the list of conversations",
    matches: controlShift("KeyS"),
    run: () => (sidebarOpen.value = !sidebarOpen.value),
  },
  { keys: "↓ / ↑", label: "Move between rows of the list; Enter opens, F2 renames, Del deletes" },
  ...[-1, 1].map(
    (step): Command => ({
      keys: step < 0 ? "Alt+↑" : "Alt+↓",
      label: step < 0 ? "Previous conversation" : "Next conversation",
      matches: altKey(step < 0 ? "ArrowUp" : "ArrowDown"),
      applies: (chat, event) => event !== null || otherConversation(chat, step) !== undefined,
      run: (chat) => {
        const target = otherConversation(chat, step);
        if (target !== undefined) void chat.open(target);
      },
    }),
  ),
  {
    keys: "Ctrl+Shift+Backspace",
    label: "Delete this conversation (with undo)",
    matches: (event) => hasControl(event) && event.shiftKey && event.key === "Backspace",
    applies: isStored,
    run: (chat) => removeConversation(chat, shownId(chat)!),
  },
  {
    keys: "Ctrl+Z",
    label: "Undo a deletion while that is offered",
    matches: control("KeyZ"),
    applies: (_, event) => pendingUndo() !== null && !(event && isInText(event)),
    run: () => pendingUndo()?.(),
    keysOnly: true,
  },
  {
    label: "Pin this conversation",
    applies: (chat) => shownHead(chat) !== undefined && !isPinned(shownHead(chat)?.metadata),
    run: (chat) => chat.conversations.pin(shownId(chat)!, true),
  },
  {
    label: "Unpin this conversation",
    applies: (chat) => isPinned(shownHead(chat)?.metadata),
    run: (chat) => chat.conversations.pin(shownId(chat)!, false),
  },
  {
    label: "Generate a title for this conversation",
    applies: isStored,
    run: (chat) => chat.autoTitler.suggest(shownId(chat)!),
  },
  { label: "Share a link to this branch", applies: isStored, run: (chat) => share(chat, shownId(chat)!) },
  {
    label: "Stop sharing this conversation",
    applies: (chat) => shownHead(chat)?.metadata?.share !== undefined,
    run: (chat) => stopSharing(chat, shownId(chat)!),
  },
  exportCommand("json", "JSON"),
  exportCommand("markdown", "Markdown"),
  exportCommand("html", "HTML"),
  {
    label: "Export all conversations as JSON",
    applies: (chat) => chat.conversations.groups.value.length > 0,
    run: exportAll,
  },
  { label: "Import conversations from files…", applies: isUnlocked, run: importFromPicker },
  themeCommand("light", "Light theme"),
  themeCommand("dark", "Dark theme"),
  themeCommand("system", "System theme"),
  { keys: "Ctrl+,", label: "Settings", matches: controlSign(","), run: () => togglePanel("settings") },
  { keys: "/", label: "Saved prompts", applies: isUnlocked, run: () => toggleDialog("prompts") },
  {
    label: "Administration",
    applies: (chat) => chat.auth.identity.value?.is_admin === true,
    run: () => toggleDialog("administration"),
  },
  { label: "Sign out", applies: (chat) => (chat.auth.identity.value?.key_id ?? null) !== null, run: leaveSession },
  {
    keys: "Shift+Esc",
    label: "Back to the message box",
    matches: (event) => event.key === "Escape" && event.shiftKey,
    run: () => focusComposer(true),
    keysOnly: true,
  },
  { keys: "Ctrl+/", label: "Keyboard shortcuts", matches: controlSign("/"), run: () => toggleDialog("shortcuts") },
];

/** The command that a key runs now. */
export function commandOf(chat: Chat, event: KeyboardEvent): Command | undefined {
  if (event.isComposing || event.defaultPrevented || (event.altKey && isInText(event))) return undefined;
  if (isEscape(event) && document.querySelector("dialog[open]")) return undefined; // closes only the dialog
  return COMMANDS.find(({ matches, applies, run }) => matches?.(event) && run && applies?.(chat, event) !== false);
}

export function listenForShortcuts(chat: Chat): void {
  addEventListener("keydown", (event) => {
    const command = commandOf(chat, event);
    if (!command) return;
    event.preventDefault();
    command.run?.(chat, event);
  });
}
