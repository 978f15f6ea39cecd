// A user message and its editor.

import { useSignal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import type { Message } from "../../chat/tree";
import { useChat } from "../context";
import { Edit } from "../icons";
import { CopyButton, VersionSwitcher } from "./MessageParts";

export function UserMessage({ message }: { message: Message }) {
  const chat = useChat();
  const editing = useSignal(false);
  const close = () => (editing.value = false);
  if (editing.value) return <Editor message={message} onClose={close} />;
  return (
    <article class="user-message" aria-label="You">
      <div class="user-text">{message.text.value}</div>
      <div class="tools">
        <VersionSwitcher message={message} />
        <CopyButton text={() => message.text.value} label="Copy message" />
        <button
          type="button"
          class="tool tool-edit"
          aria-label="Edit as a new branch"
          title="Edit as a new branch"
          disabled={chat.live.value !== null}
          onClick={() => (editing.value = true)}
        >
          <Edit />
        </button>
      </div>
    </article>
  );
}

function Editor({ message, onClose }: { message: Message; onClose: () => void }) {
  const chat = useChat();
  const area = useRef<HTMLTextAreaElement>(null);
  // before the paint, so that no key press is lost
  useLayoutEffect(() => {
    area.current?.focus();
    area.current?.setSelectionRange(-1, -1);
  }, []);
  const save = () => {
    const text = area.current?.value.trim() ?? "";
    if (text === "") return;
    onClose();
    if (text !== message.text.value) chat.edit(message, text);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.isComposing) return;
    if (event.key === "Escape") {
      event.stopPropagation();
      onClose();
    } else if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      save();
    }
  };
  return (
    <div class="user-message user-editor">
      <textarea ref={area} aria-label="Edit message" rows={3} defaultValue={message.text.value} onKeyDown={onKeyDown} />
      <div class="editor-foot">
        <span class="hint">The old version stays as a branch.</span>
        <button type="button" class="button" onClick={onClose}>
          Cancel
        </button>
        <button type="button" class="button button-main" onClick={save}>
          Send
        </button>
      </div>
    </div>
  );
}
