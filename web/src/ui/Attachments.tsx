// Files of a message: the button that attaches them, chips in the message box, and cards of a sent message.

import { useSignal } from "@preact/signals";
import { formatBytes, plural } from "../app/format";
import { type Attachment, type FileBlock, isFromCache, MAX_FILE_BYTES } from "../chat/attachments";
import type { Message } from "../chat/tree";
import { useChat } from "./context";
import { Close, FileText, Paperclip } from "./icons";
import { focusComposer } from "./navigation";

export function AttachButton() {
  const { attachments } = useChat();
  const label = `Attach text files or PDFs, up to ${formatBytes(MAX_FILE_BYTES)} each`;
  const pick = () => {
    const input = document.createElement("input");
    input.type = "file";
    input.multiple = true;
    input.onchange = () => {
      void attachments.add([...(input.files ?? [])]);
      focusComposer();
    };
    input.click();
  };
  return (
    <button type="button" class="chip attach" aria-label="Attach files" title={label} onClick={pick}>
      <Paperclip />
    </button>
  );
}

/** Files in the message box, with what they cost. */
export function AttachmentChips() {
  const { attachments } = useChat();
  const list = attachments.list.value;
  if (list.length === 0) return null;
  return (
    <div class="attachments">
      <ul aria-label="Attached files">
        {list.map((file, index) => (
          <Chip key={`${index} ${file.name}`} file={file} />
        ))}
      </ul>
      <CostNote />
    </div>
  );
}

function Chip({ file }: { file: Attachment }) {
  const { attachments, prefill } = useChat();
  const remove = (event: MouseEvent & { currentTarget: HTMLElement }) => {
    const chip = event.currentTarget.closest("li");
    const next = chip?.nextElementSibling ?? chip?.previousElementSibling;
    const target = next?.querySelector<HTMLElement>(".attachment-remove");
    attachments.remove(file);
    if (target) target.focus();
    else focusComposer();
  };
  const insert = () => {
    attachments.remove(file);
    prefill.text.value = [prefill.text.value, file.pasted].filter(Boolean).join("\n");
    focusComposer();
  };
  return (
    <li class={`attachment attachment-${file.state}`}>
      <FileText />
      <span class="attachment-text">
        <span class="attachment-name" dir="auto" title={file.name}>
          {file.name}
        </span>
        <span class="attachment-cost">
          {file.state === "failed" ? file.error : file.state === "reading" ? "reading…" : <Cost file={file} />}
        </span>
        {file.pasted !== null && (
          <button type="button" class="link" onClick={insert}>
            Insert as text
          </button>
        )}
      </span>
      <button type="button" class="tool attachment-remove" aria-label={`Remove ${file.name}`} onClick={remove}>
        <Close />
      </button>
    </li>
  );
}

function Cost({ file }: { file: Attachment }) {
  const pages = file.pages === null ? "" : `${plural(file.pages, "page")}, `;
  return (
    <>
      {pages}
      {formatBytes(file.bytes)}, <b data-tokens={file.tokens}>{countTokens(file.tokens)}</b>
      {isFromCache(file) && (
        <span class="badge" title={`${file.cachedTokens} of ${file.tokens} tokens need no computation`}>
          in the cache
        </span>
      )}
    </>
  );
}

/** The cost of several files, and a warning if they do not fit. */
function CostNote() {
  const chat = useChat();
  const tokens = chat.attachments.tokens.value;
  if (!chat.attachments.fit.value) {
    return (
      <p class="attachment-warning" role="alert">
        Too long for the model: the files have {countTokens(tokens)}, and{" "}
        {chat.attachments.freeTokens.value.toLocaleString("en")} of its {chat.maxTokens.value.toLocaleString("en")} are
        free.
      </p>
    );
  }
  return chat.attachments.ready.value.length > 1 ? <p class="hint">Together {countTokens(tokens)}</p> : null;
}

function countTokens(count: number): string {
  return `${count.toLocaleString("en")} ${count === 1 ? "token" : "tokens"}`;
}

/** Files of a sent message; each unfolds to its text. */
export function FileCards({ message, files }: { message: Message; files: readonly FileBlock[] }) {
  const chat = useChat();
  const sent = chat.attachments.sentWith(message);
  const thread = chat.thread.value;
  const answer = thread.tree.value.childrenOf(message.key)[0];
  const cachedTokens = (answer && thread.turnOf(answer)?.usage.value?.cachedTokens) ?? 0;
  return (
    <ul class="file-cards" aria-label="Files">
      {files.map((file, index) => {
        const known = sent.find(({ block }) => block === file.block);
        // what was found in the cache when it was attached may have been evicted before the answer
        const fromCache = known !== undefined && isFromCache(known) && cachedTokens >= known.cachedTokens;
        return (
          <li key={index}>
            <FileCard file={file} fromCache={fromCache} />
          </li>
        );
      })}
    </ul>
  );
}

/** The size is in characters: after a reload, and in other tabs, the page does not know the tokens of a sent file. */
function FileCard({ file, fromCache }: { file: FileBlock; fromCache: boolean }) {
  const open = useSignal(false);
  const { length } = file.text;
  const size = `${length.toLocaleString("en")} ${length === 1 ? "character" : "characters"}`;
  return (
    <details class="file-card" onToggle={(event) => (open.value = event.currentTarget.open)}>
      <summary>
        <FileText />
        <span class="attachment-text">
          <span class="attachment-name" dir="auto" title={file.name}>
            {file.name}
          </span>
          <span class="attachment-cost">{size}</span>
          {fromCache && (
            <span class="badge" title="Its pages were in the cache: the file was not computed again">
              from the cache
            </span>
          )}
        </span>
      </summary>
      {open.value && (
        <pre dir="auto" tabIndex={0} role="region" aria-label={`Text of ${file.name}`}>
          {file.text}
        </pre>
      )}
    </details>
  );
}
