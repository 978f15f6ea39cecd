// Keyboard shortcuts: the table, its key handler, and the dialog that lists them.

import { useEffect, useRef } from "preact/hooks";
import type { Chat } from "../chat/chat";
import type { Turn } from "../chat/turn";
import { Close } from "./icons";
import {
  closePanel,
  findOpen,
  focusComposer,
  isNarrow,
  panel,
  SIDE_PANELS,
  sidebarOpen,
  sidePanel,
  togglePanel,
  toggleSidePanel,
} from "./navigation";

interface Shortcut {
  readonly keys: string;
  readonly description: string;
  readonly matches?: (event: KeyboardEvent) => boolean;
  readonly run?: (chat: Chat, event: KeyboardEvent) => unknown; // returns false if the event was not handled
}

const hasControl = (event: KeyboardEvent) => event.ctrlKey || event.metaKey;
/** Whether the key belongs to a text field: in one with text, Alt and Option move the caret or type other letters. */
function belongsToText({ target, altKey }: KeyboardEvent): boolean {
  if (!altKey || !(target instanceof HTMLInputElement || target instanceof HTMLTextAreaElement)) return false;
  return target.value !== "";
}
const chord = (code: string) => (event: KeyboardEvent) => hasControl(event) && event.shiftKey && event.code === code;

const SHORTCUTS: readonly Shortcut[] = [
  { keys: "Enter", description: "Send" },
  { keys: "Shift+Enter", description: "New line" },
  { keys: "Alt+Enter", description: "Send after the running answer (Enter: stop it, and send now)" },
  {
    keys: "Esc",
    description: "Stop the answer, or close a panel",
    matches: (event) => event.key === "Escape" && !event.shiftKey,
    run: (chat) => {
      if (isNarrow() && sidebarOpen.value) {
        sidebarOpen.value = false;
        focusComposer();
      } else if (panel.value === "settings" || (sidePanel.value !== null && !chat.live.value)) {
        panel.value = null;
        focusComposer();
      } else if (chat.live.value) chat.stop();
      else return false;
      return true;
    },
  },
  { keys: "↑", description: "Edit the last message (from an empty message box)" },
  {
    keys: "Alt+Shift+1 … 4",
    description: "Candidates, beams, branches, KV pages",
    matches: (event) => event.altKey && event.shiftKey && !hasControl(event) && /^Digit[1-4]$/.test(event.code),
    run: (_, event) => togglePanel(SIDE_PANELS[Number(event.code.slice(5)) - 1]!),
  },
  {
    keys: "Ctrl+.",
    description: "Show or hide the panel",
    matches: (event) => hasControl(event) && event.key === ".",
    run: toggleSidePanel,
  },
  {
    keys: "Alt+1 … 8",
    description: "Pick a candidate",
    matches: (event) => event.altKey && !event.shiftKey && !hasControl(event) && /^Digit[1-8]$/.test(event.code),
    run: (chat, event) => {
      const turn = lastTurn(chat);
      const picked = turn?.candidates[Number(event.code.slice(5)) - 1];
      if (!turn || turn.candidates.length < 2 || !picked) return false;
      chat.pick(picked);
      focusComposer();
      return true;
    },
  },
  {
    keys: "Alt+Del",
    description: "Drop the focused candidate while it is generated",
    matches: (event) => event.altKey && event.key === "Delete",
    run: () => {
      const drop = document.activeElement?.closest(".card")?.querySelector<HTMLElement>(".card-drop");
      drop?.click();
      return drop !== undefined && drop !== null;
    },
  },
  {
    keys: "Alt+B",
    description: "Show the tokens of the last answer",
    matches: (event) => event.altKey && !event.shiftKey && !hasControl(event) && event.code === "KeyB",
    run: (chat) => {
      const leaf = chat.thread.value.tree.value.leaf.value;
      if (leaf?.role !== "assistant" || !chat.forks.canOpen(leaf)) return false;
      void chat.forks.open(leaf);
      return true;
    },
  },
  {
    keys: "Alt+← / →",
    description: "Previous or next version of the last answer (Alt shortcuts: outside a text being written)",
    matches: (event) => event.altKey && (event.key === "ArrowLeft" || event.key === "ArrowRight"),
    run: (chat, event) => {
      const tree = chat.thread.value.tree.value;
      const leaf = tree.leaf.value;
      if (!leaf) return false;
      const siblings = tree.siblings(leaf);
      const target = siblings[siblings.indexOf(leaf) + (event.key === "ArrowLeft" ? -1 : 1)];
      if (target) chat.choose(target);
      return true;
    },
  },
  { keys: "Ctrl+Shift+O", description: "New chat", matches: chord("KeyO"), run: (chat) => chat.newConversation() },
  {
    keys: "Ctrl+K",
    description: "Find a conversation",
    matches: (event) => hasControl(event) && !event.shiftKey && event.code === "KeyK",
    run: () => {
      const focus = () => document.getElementById("find")?.focus();
      if (sidebarOpen.value) return focus(); // immediately: the next key is typed into the box
      sidebarOpen.value = true;
      setTimeout(focus);
    },
  },
  {
    keys: "Ctrl+F",
    description: "Find in this conversation, on all branches (again: the browser's search)",
    matches: (event) => hasControl(event) && !event.shiftKey && event.code === "KeyF",
    run: (chat) => {
      if (findOpen.value || chat.thread.value.tree.value.path.value.length === 0) return false;
      findOpen.value = true;
      return true;
    },
  },
  { keys: "↓ / ↑", description: "Move between rows of the list; Enter opens, F2 renames, Del deletes" },
  {
    keys: "Alt+↑ / ↓",
    description: "Previous or next conversation",
    matches: (event) => event.altKey && !hasControl(event) && (event.key === "ArrowUp" || event.key === "ArrowDown"),
    run: (chat, event) => {
      const listed = chat.conversations.groups.value.flatMap(({ conversations }) => conversations);
      const at = listed.findIndex(({ id }) => id === chat.thread.value.id.value);
      const target = at < 0 ? listed[0] : listed[at + (event.key === "ArrowUp" ? -1 : 1)];
      if (target) void chat.open(target.id);
      return true;
    },
  },
  {
    keys: "Ctrl+Shift+Backspace",
    description: "Delete this conversation (with undo)",
    matches: (event) => hasControl(event) && event.shiftKey && event.key === "Backspace",
    run: (chat) => {
      const id = chat.thread.value.id.value;
      if (id === null) return false;
      chat.remove(id);
      return true;
    },
  },
  {
    keys: "Ctrl+Shift+S",
    description: "Show or hide the list",
    matches: chord("KeyS"),
    run: () => {
      sidebarOpen.value = !sidebarOpen.value;
      return true;
    },
  },
  {
    keys: "Ctrl+,",
    description: "Settings",
    matches: (event) => hasControl(event) && event.key === ",",
    run: () => togglePanel("settings"),
  },
  {
    keys: "Shift+Esc",
    description: "Back to the message box",
    matches: (event) => event.key === "Escape" && event.shiftKey,
    run: focusComposer,
  },
  {
    keys: "Ctrl+/",
    description: "Keyboard shortcuts",
    matches: (event) => hasControl(event) && event.key === "/",
    run: () => togglePanel("shortcuts"),
  },
];

function lastTurn(chat: Chat): Turn | undefined {
  const leaf = chat.thread.value.tree.value.leaf.value;
  return leaf ? chat.thread.value.turnOf(leaf) : undefined;
}

export function listenForShortcuts(chat: Chat): void {
  addEventListener("keydown", (event) => {
    if (event.isComposing || event.defaultPrevented || belongsToText(event)) return;
    const shortcut = SHORTCUTS.find((candidate) => candidate.matches?.(event));
    if (shortcut?.run && shortcut.run(chat, event) !== false) event.preventDefault();
  });
}

export function Shortcuts() {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    dialog.current?.showModal();
  }, []);
  return (
    <dialog class="dialog" ref={dialog} aria-label="Keyboard shortcuts" onClose={() => closePanel("shortcuts")}>
      <header class="panel-head">
        <h2>Keyboard</h2>
        <button type="button" class="tool" aria-label="Close shortcuts" onClick={() => dialog.current?.close()}>
          <Close />
        </button>
      </header>
      <dl class="keys">
        {SHORTCUTS.map((shortcut) => (
          <div key={shortcut.keys}>
            <dt>
              {shortcut.keys.split("+").map((key) => (
                <kbd key={key}>{key}</kbd>
              ))}
            </dt>
            <dd>{shortcut.description}</dd>
          </div>
        ))}
      </dl>
    </dialog>
  );
}
