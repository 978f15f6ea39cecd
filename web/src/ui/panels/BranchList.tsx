// List of branches: tokens shared with others, own and not cached, the text, a star and a name; compare two, delete one.

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { explainPrompt } from "../../api/rest";
import { plural, truncate } from "../../app/format";
import { toast } from "../../app/notifications";
import {
  type Branch,
  type BranchMark,
  type BranchTokens,
  branchName,
  countTokens,
  listBranches,
  MAX_NAME_CHARS,
  NEXT_INPUT,
  ownStart,
  ownText,
  readMarks,
  removeBranch,
  withMark,
} from "../../chat/branchList";
import { compareTexts } from "../../chat/compare";
import type { Tree } from "../../chat/tree";
import { useChat } from "../context";
import { Check, Columns, Edit, Pin, Trash } from "../icons";
import { goToMessage } from "../navigation";
import "./branch-list.css";

const MAX_LOOKUPS = 40; // branches whose tokens are counted, the newest ones

export function BranchList({ tree }: { tree: Tree }) {
  const chat = useChat();
  const branches = listBranches(tree);
  const conversation = chat.thread.value.id.value;
  const tokens = useSignal<ReadonlyMap<string, BranchTokens>>(new Map()); // by key of the leaf
  const pair = useSignal<readonly string[]>([]);
  const live = chat.live.value !== null;
  const leaves = branches.map(({ leaf }) => leaf.id.value).join();
  useEffect(() => {
    if (live || conversation === null || branches.length < 2) return;
    let isShown = true;
    void (async () => {
      for (const branch of branches.slice(-MAX_LOOKUPS)) {
        const id = branch.leaf.id.value;
        if (id === null) continue;
        const prompt = await explainPrompt({ previous_item_id: id, input: NEXT_INPUT }).catch(() => null);
        if (!isShown) return;
        const counts = prompt && countTokens(branch, prompt);
        if (counts) tokens.value = new Map([...tokens.value, [branch.leaf.key, counts]]);
      }
    })();
    return () => {
      isShown = false;
    };
  }, [leaves, live, conversation]);
  if (branches.length < 2) return null;
  const marks = readMarks(conversation === null ? null : chat.conversations.find(conversation)?.metadata);
  const markOf = (branch: Branch): BranchMark => marks[ownStart(branch).id.value ?? ""] ?? { name: "", starred: false };
  const sorted = branches.toSorted((a, b) => +markOf(b).starred - +markOf(a).starred);
  const compared = pair.value.flatMap((key) => branches.filter(({ leaf }) => leaf.key === key));
  const togglePair = (key: string) => {
    const others = pair.value.filter((each) => each !== key);
    pair.value = others.length < pair.value.length ? others : [...others.slice(-1), key];
  };
  return (
    <section class="branch-list" aria-label="Branches">
      {compared.length === 2 && <ComparedBranches branches={compared} nameOf={(branch) => markOf(branch).name} />}
      <ol>
        {sorted.map((branch) => (
          <BranchRow
            key={branch.leaf.key}
            branch={branch}
            name={branchName(branch, branches.indexOf(branch) + 1, marks)}
            mark={markOf(branch)}
            tokens={tokens.value.get(branch.leaf.key) ?? null}
            isShown={tree.leaf.value === branch.leaf}
            isPaired={pair.value.includes(branch.leaf.key)}
            onPair={() => togglePair(branch.leaf.key)}
          />
        ))}
      </ol>
    </section>
  );
}

interface RowProps {
  readonly branch: Branch;
  readonly name: string;
  readonly mark: BranchMark;
  readonly tokens: BranchTokens | null;
  readonly isShown: boolean;
  readonly isPaired: boolean;
  readonly onPair: () => void;
}

function BranchRow({ branch, name, mark, tokens, isShown, isPaired, onPair }: RowProps) {
  const chat = useChat();
  const renaming = useSignal(false);
  const deleting = useSignal(false);
  const numOwn = branch.path.length - branch.ownFrom;
  const save = (change: Partial<BranchMark>) => {
    const conversation = chat.thread.value.id.value;
    const id = ownStart(branch).id.value;
    if (conversation === null || id === null) return;
    void chat.conversations.changeMetadata(conversation, (metadata) => {
      const next = withMark(metadata, id, { ...mark, ...change });
      if (!next) toast("No room for another name: shorten or remove one.");
      return next ?? metadata ?? {};
    });
  };
  return (
    <li class={`branch-row ${isShown ? "branch-row-shown" : ""}`}>
      {renaming.value ? (
        <input
          class="branch-name"
          aria-label="Name of the branch"
          maxLength={MAX_NAME_CHARS}
          value={mark.name}
          ref={(box) => box?.focus()}
          onBlur={(event) => {
            if (renaming.value) save({ name: event.currentTarget.value.trim() });
            renaming.value = false;
          }}
          onKeyDown={(event) => {
            if (event.key === "Escape") renaming.value = false;
            else if (event.key === "Enter") event.currentTarget.blur();
            else return;
            event.preventDefault();
            event.stopPropagation();
          }}
        />
      ) : (
        <button
          type="button"
          class="branch-open"
          aria-current={isShown ? "true" : undefined}
          onClick={() => goToMessage(chat, branch.leaf)}
        >
          <b>{name}</b>
          <span class="hint">{truncate(ownText(branch).replace(/\s+/g, " "), 120) || "…"}</span>
        </button>
      )}
      <span class="branch-tools">
        <button
          type="button"
          class="tool"
          aria-label={`Star ${name}`}
          aria-pressed={mark.starred}
          title="Star: first in the list"
          onClick={() => save({ starred: !mark.starred })}
        >
          <Pin />
        </button>
        <button
          type="button"
          class="tool"
          aria-label={`Rename ${name}`}
          title="Rename"
          onClick={() => (renaming.value = true)}
        >
          <Edit />
        </button>
        <button
          type="button"
          class="tool"
          aria-label={`Compare ${name}`}
          aria-pressed={isPaired}
          title="Compare with another branch: choose two"
          onClick={onPair}
        >
          <Columns />
        </button>
        <button
          type="button"
          class={deleting.value ? "button branch-delete" : "tool"}
          aria-label={`Delete ${name}`}
          title={`Delete its own ${plural(numOwn, "message")}`}
          disabled={chat.live.value !== null}
          onBlur={() => (deleting.value = false)}
          onClick={() => {
            if (deleting.value) void removeBranch(chat, branch);
            deleting.value = !deleting.value;
          }}
        >
          {deleting.value ? (
            <>
              <Check /> Delete {plural(numOwn, "message")}
            </>
          ) : (
            <Trash />
          )}
        </button>
      </span>
      {tokens && <TokenBar tokens={tokens} />}
    </li>
  );
}

/** Tokens of a branch as a bar: shared with other branches, own, and over both those that are not cached. */
function TokenBar({ tokens: { shared, total, cold } }: { tokens: BranchTokens }) {
  const own = total - shared;
  return (
    <p class="branch-tokens">
      <svg viewBox={`0 0 ${Math.max(1, total)} 1`} preserveAspectRatio="none" aria-hidden="true">
        <rect class="branch-tokens-shared" width={shared} height="1" />
        <rect class="branch-tokens-own" x={shared} width={own} height="1" />
        <rect class="branch-tokens-cold" x={total - cold} width={cold} height="1" />
      </svg>
      <span>
        <b data-tokens="shared">{shared}</b> shared, <b data-tokens="own">{own}</b> own,{" "}
        <b data-tokens="cold">{cold}</b> of {total} tokens cold
      </span>
    </p>
  );
}

function ComparedBranches({
  branches,
  nameOf,
}: {
  readonly branches: readonly Branch[];
  readonly nameOf: (branch: Branch) => string;
}) {
  const { common, rests } = compareTexts(branches.map(ownText));
  return (
    <div class="branch-compared">
      {common.trim() !== "" && <p class="common-prefix">{truncate(common, 160)}</p>}
      {rests.map((parts, index) => (
        <div key={index}>
          <b>{nameOf(branches[index]!) || (index === 0 ? "First" : "Second")}</b>
          <p class="differences" dir="auto">
            {parts.map(({ text, differs }, at) => (differs ? <mark key={at}>{text}</mark> : text))}
          </p>
        </div>
      ))}
    </div>
  );
}
