// Candidates panel: all versions of one answer, the common beginning shown once.

import { useComputed } from "@preact/signals";
import { commonPrefix, truncate } from "../../app/format";
import { setSampling } from "../../app/settings";
import { describeMessage } from "../../chat/attachments";
import type { Chat } from "../../chat/chat";
import type { Message } from "../../chat/tree";
import { useChat } from "../context";
import { EmptyPanel } from "../EmptyState";
import { Close } from "../icons";
import { focusComposer, goToMessage } from "../navigation";
import { STATUS_LABELS } from "../thread/MessageParts";

const SHARED_CHARS = 220;

export function CandidatesPanel() {
  const chat = useChat();
  const tree = chat.thread.value.tree.value;
  const answer = tree.path.value.findLast(
    (message) => message.role === "assistant" && tree.siblings(message).length > 1,
  );
  if (!answer) return <NoCandidates />;
  const versions = tree.siblings(answer);
  const question = answer.parent === null ? undefined : tree.get(answer.parent);
  return (
    <Versions
      key={answer.parent}
      question={describeMessage(question?.text.value ?? "")}
      versions={versions}
      shown={answer}
    />
  );
}

function NoCandidates() {
  const tryIt = () => {
    setSampling({ search: "sample", n: 4 });
    focusComposer(true);
  };
  return (
    <EmptyPanel title="One prompt, many answers" action="Try 4 answers" onAction={tryIt}>
      Request several answers: the prompt is computed once and shared. Or regenerate an answer. All versions of the
      latest answer with several versions are listed here.
    </EmptyPanel>
  );
}

interface VersionsProps {
  readonly question: string;
  readonly versions: readonly Message[];
  readonly shown: Message;
}

function Versions({ question, versions, shown }: VersionsProps) {
  const chat = useChat();
  const shared = useComputed(() => commonPrefix(versions.map((message) => message.text.value)));
  const common = shared.value;
  return (
    <>
      <p class="side-summary">
        <span>
          <b>{versions.length} answers</b> to <q>{truncate(question, 80)}</q>
        </span>
      </p>
      {common.trim() !== "" && (
        <p class="common-prefix">
          <span class="hint">Common beginning</span>
          {truncate(common.trim(), SHARED_CHARS)}
        </p>
      )}
      <ol class="version-list">
        {versions.map((message, index) => (
          <li key={message.key} class="version-row">
            <button
              type="button"
              class="version"
              aria-current={message === shown ? "true" : undefined}
              onClick={() => {
                chat.pick(message);
                goToMessage(chat, message);
              }}
            >
              <span class="card-number">{index + 1}</span>
              <span class="version-text">
                {message.text.value.slice(common.length).trimStart() ||
                  (message.text.value === "" ? "…" : "(no further text)")}
              </span>
              <span class="version-state">{versionLabel(chat, message, shown)}</span>
            </button>
            {chat.thread.value.turnOf(message)?.canDrop(message) && (
              <button
                type="button"
                class="tool version-drop"
                aria-label={`Drop answer ${index + 1}`}
                title="Stop this answer and free its KV pages"
                onClick={() => chat.drop(message)}
              >
                <Close />
              </button>
            )}
          </li>
        ))}
      </ol>
      <p class="hint">Picking an answer shows its branch. The others are kept.</p>
    </>
  );
}

function versionLabel(chat: Chat, message: Message, shown: Message): string {
  if (chat.thread.value.turnOf(message)?.dropped.value.has(message)) return "dropped";
  const status = message.status.value;
  if (message === shown) return "shown";
  return status === "done" ? "" : STATUS_LABELS[status];
}
