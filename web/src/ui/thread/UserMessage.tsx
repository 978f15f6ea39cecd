// A user message.

import { useSignal } from "@preact/signals";
import { plural } from "../../app/format";
import { joinMessage, splitMessage } from "../../chat/attachments";
import { QUESTION_EDITOR } from "../../chat/drafts";
import type { Message } from "../../chat/tree";
import { FileCards } from "../Attachments";
import { useChat } from "../context";
import { Edit } from "../icons";
import { MessageEditor, MessageMenu } from "./MessageEditor";
import { CopyButton, VersionSwitcher } from "./MessageParts";

export function UserMessage({ message }: { message: Message }) {
  const chat = useChat();
  const editing = useSignal<"question" | "answer" | null>(null);
  const onClose = () => (editing.value = null);
  const { files, text } = splitMessage(message.text.value);
  const cards = files.length > 0 && <FileCards message={message} files={files} />;
  if (editing.value === "question") {
    const send = (edited: string) => {
      const content = joinMessage(files, edited);
      if (content !== message.text.value) chat.edit(message, content);
    };
    return (
      <MessageEditor
        message={message}
        label={QUESTION_EDITOR}
        text={text}
        hint={`The old version stays as a branch.${files.length > 0 ? ` The new one has its ${plural(files.length, "file")}.` : ""}`}
        actions={[{ label: "Send", run: send }]}
        onClose={onClose}
      >
        {cards}
      </MessageEditor>
    );
  }
  return (
    <article class="user-message" aria-label="You">
      <div class="user-content">
        {cards}
        {text !== "" && <UserText text={text} />}
      </div>
      <div class="tools">
        <VersionSwitcher message={message} />
        <CopyButton text={() => text || message.text.value} label="Copy message" />
        <button
          type="button"
          class="tool tool-edit"
          aria-label="Edit as a new branch"
          title="Edit as a new branch"
          disabled={chat.live.value !== null}
          onClick={() => (editing.value = "question")}
        >
          <Edit />
        </button>
        <MessageMenu
          message={message}
          entries={[{ label: "Begin an answer…", icon: <Edit />, run: () => (editing.value = "answer") }]}
        />
      </div>
      {editing.value === "answer" && (
        <MessageEditor
          message={message}
          label="Beginning of the answer"
          text=""
          hint="The model goes on from here."
          actions={[{ label: "Continue", run: (text) => chat.answerFrom(message, text) }]}
          onClose={onClose}
        />
      )}
    </article>
  );
}

const FOLDED_LINES = 24;
const FOLDED_CHARS = 2000;

/** The text of a message; a long one is folded. */
function UserText({ text }: { text: string }) {
  const unfolded = useSignal(false);
  const isLong = text.length > FOLDED_CHARS || text.split("\n", FOLDED_LINES + 1).length > FOLDED_LINES;
  if (!isLong)
    return (
      <div class="user-text" dir="auto">
        {text}
      </div>
    );
  const shown = unfolded.value ? text : `${text.split("\n", FOLDED_LINES).join("\n").slice(0, FOLDED_CHARS)}…`;
  return (
    <div class="user-folded">
      <div class="user-text" dir="auto">
        {shown}
      </div>
      <button
        type="button"
        class="link"
        aria-expanded={unfolded.value}
        onClick={() => (unfolded.value = !unfolded.value)}
      >
        {unfolded.value ? "Show less" : `Show all ${text.length.toLocaleString("en")} characters`}
      </button>
    </div>
  );
}
