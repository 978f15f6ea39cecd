// Editor of a message in its place: a question, an answer, or the beginning of an answer. And the menu of a message.
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { toast } from "../../app/notifications";
import type { Message } from "../../chat/tree";
import { useChat } from "../context";
import { Fork, More, Trash } from "../icons";
import { MenuButton, type MenuItem } from "../Menu";
import { closeSidebarIfNarrow, focusComposer, isTouch, restoredMessage } from "../navigation";

export interface EditorAction {
  readonly label: string;
  readonly run: (text: string) => void;
}

interface EditorProps {
  readonly message: Message;
  readonly label: string;
  readonly text: string;
  readonly hint: string;
  readonly actions: readonly EditorAction[]; // Enter runs the last one
  readonly isTall?: boolean; // on a narrow screen it takes most of the height
  readonly onClose: () => void;
  readonly children?: ComponentChildren; // above the text
}

export function MessageEditor(props: EditorProps) {
  const { message, label, text, hint, actions, isTall = false, onClose, children } = props;
  const area = useRef<HTMLTextAreaElement>(null);
  // before the paint, so that no key press is lost
  useLayoutEffect(() => {
    area.current?.focus();
    area.current?.setSelectionRange(-1, -1);
  }, []);
  const chat = useChat();
  const { drafts } = chat.unsent;
  const draft = drafts.editOf(message, label) ?? text;
  const keep = (written: string) => drafts.keepEdit(message, label, written === text ? null : written);
  const close = (kept = text) => {
    keep(kept);
    onClose();
    focusComposer(); // otherwise the focus is lost with the editor
  };
  const run = (action: EditorAction) => {
    const written = area.current?.value.trim() ?? "";
    if (written === "") return;
    if (chat.live.value) {
      toast("An answer is being written.");
      return;
    }
    close();
    action.run(written);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.isComposing) return;
    if (event.key === "Escape") {
      event.stopPropagation();
      close(area.current?.value);
    } else if (event.key === "Enter" && !event.shiftKey && !isTouch()) {
      event.preventDefault();
      run(actions.at(-1)!);
    }
  };
  return (
    <div class={`user-message user-editor ${isTall ? "user-editor-tall" : ""}`}>
      {children}
      <textarea
        ref={area}
        aria-label={label}
        dir="auto"
        enterkeyhint={isTouch() ? "enter" : "done"}
        rows={editorRows(draft)}
        defaultValue={draft}
        onInput={(event) => keep(event.currentTarget.value)}
        onKeyDown={onKeyDown}
      />
      <div class="editor-foot">
        <span class="hint">{hint}</span>
        <button type="button" class="button" onClick={() => close()}>
          Cancel
        </button>
        {actions.map((action, index) => (
          <button
            key={action.label}
            type="button"
            class={index === actions.length - 1 ? "button button-main" : "button"}
            onClick={() => run(action)}
          >
            {action.label}
          </button>
        ))}
      </div>
    </div>
  );
}

const MIN_EDITOR_ROWS = 3;
const MAX_EDITOR_ROWS = 16;
const EDITOR_LINE_CHARS = 80;

function editorRows(text: string): number {
  const lines = text.split("\n").reduce((sum, line) => sum + Math.ceil((line.length + 1) / EDITOR_LINE_CHARS), 0);
  return Math.min(MAX_EDITOR_ROWS, Math.max(MIN_EDITOR_ROWS, lines));
}

/** Menu of a message. `entries`: its own ones, before those of all messages. */
export function MessageMenu({ message, entries }: { message: Message; entries: readonly MenuItem[] }) {
  const chat = useChat();
  const branch = async () => {
    const id = await chat.edits.branch(message);
    if (id === null) return;
    closeSidebarIfNarrow();
    await chat.open(id);
  };
  const remove = () => chat.edits.remove(message, () => (restoredMessage.value = message));
  const items: MenuItem[] = chat.live.value
    ? []
    : [
        ...entries,
        { label: "Branch into a new chat", icon: <Fork />, run: () => void branch() },
        { label: "Delete", icon: <Trash />, danger: true, line: true, run: remove },
      ];
  return (
    <MenuButton
      class="tool tool-more"
      label={message.role === "user" ? "Actions for your message" : "Actions for the answer"}
      note={chat.live.value ? "An answer is being written." : undefined}
      items={items}
    >
      <More />
    </MenuButton>
  );
}
