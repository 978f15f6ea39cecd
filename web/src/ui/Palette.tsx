// The command palette: one field that finds commands, conversations by title, and leads to the search of messages.

import { useComputed, useSignal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { filterMatches, LETTERS } from "../app/matchText";
import type { Chat } from "../chat/chat";
import { COMMANDS, commandOf, searchConversations } from "./commands";
import { useChat } from "./context";
import { Modal } from "./Modal";
import { closeSidebarIfNarrow, paletteOpen } from "./navigation";
import { Keys } from "./Shortcuts";
import "./palette.css";

const MAX_CONVERSATIONS = 8;
const MAX_RECENT = 4; // conversations without a query

interface Option {
  readonly key: string;
  readonly label: string;
  readonly keys?: string | undefined;
  readonly run: () => unknown;
}

interface Group {
  readonly name: string;
  readonly options: readonly Option[];
}

/** The commands and conversations that match a query. Matches of scattered letters are listed if there are no others. */
export function findOptions(chat: Chat, query: string): readonly Group[] {
  const listed = COMMANDS.filter(({ run, keysOnly, applies }) => run && !keysOnly && applies?.(chat, null) !== false);
  const commands = filterMatches(query, listed, ({ label }) => label);
  const heads = chat.conversations.groups.value.flatMap(({ conversations }) => conversations);
  const conversations = filterMatches(query, heads, ({ title }) => title || "Untitled");
  const least = [...commands, ...conversations].some(({ match }) => match > LETTERS) ? LETTERS + 1 : LETTERS;
  const text = query.trim();
  const search = { key: "search", label: `Search messages for “${text}”`, run: () => searchConversations(chat, text) };
  const groups: Group[] = [
    {
      name: "Commands",
      options: commands
        .filter(({ match }) => match >= least)
        .map(({ item }) => ({
          key: item.label,
          label: item.label,
          keys: item.keys,
          run: () => item.run?.(chat, null),
        })),
    },
    {
      name: "Conversations",
      options: conversations
        .filter(({ match }) => match >= least)
        .slice(0, text === "" ? MAX_RECENT : MAX_CONVERSATIONS)
        .map(({ item: { id, title } }) => ({ key: id, label: title || "Untitled", run: () => open(chat, id) })),
    },
    { name: "Messages", options: text === "" || chat.conversations.state.value === "locked" ? [] : [search] },
  ];
  return groups.filter(({ options }) => options.length > 0);
}

function open(chat: Chat, id: string): void {
  closeSidebarIfNarrow();
  void chat.open(id);
}

export function Palette() {
  const chat = useChat();
  const dialog = useRef<HTMLDialogElement>(null);
  const query = useSignal("");
  const active = useSignal(0);
  const groups = useComputed(() => findOptions(chat, query.value)).value;
  const options = groups.flatMap((group) => group.options);
  const at = Math.min(active.value, options.length - 1);
  const count = options.length;
  useLayoutEffect(() => document.getElementById(`palette-${at}`)?.scrollIntoView?.({ block: "nearest" }), [at, count]);

  const close = () => dialog.current?.close(); // the focus returns before a command moves it
  const run = (option: Option) => {
    close();
    void option.run();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.isComposing) return;
    const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (event.key === "Escape") {
      event.stopPropagation(); // the dialog closes; a running answer goes on
    } else if (step !== 0 && !event.altKey) {
      event.preventDefault();
      active.value = (at + step + count) % count;
    } else if (event.key === "Enter") {
      event.preventDefault();
      if (options[at]) run(options[at]);
    } else if (commandOf(chat, event)) close(); // the key handler of the page runs it
  };
  return (
    <Modal
      class="palette"
      dialog={dialog}
      label="Commands"
      onClosed={() => (paletteOpen.value = false)}
      onKeyDown={onKeyDown}
      onClick={(event) => event.target === dialog.current && close()}
    >
      <input
        class="palette-query"
        type="text"
        role="combobox"
        aria-label="Find a command or a conversation"
        placeholder="Find a command or a conversation"
        aria-expanded={count > 0}
        aria-controls="palette-options"
        aria-autocomplete="list"
        aria-activedescendant={at < 0 ? undefined : `palette-${at}`}
        autocomplete="off"
        autofocus
        maxLength={200}
        value={query.value}
        onInput={(event) => {
          query.value = event.currentTarget.value;
          active.value = 0;
        }}
      />
      {count === 0 && <p class="hint palette-empty">Nothing matches.</p>}
      <div class="palette-options" id="palette-options" role="listbox" aria-label="Found" hidden={count === 0}>
        {groups.map((group) => (
          <div key={group.name} role="group" aria-label={group.name}>
            <div class="palette-heading" aria-hidden="true">
              {group.name}
            </div>
            {group.options.map((option) => {
              const index = options.indexOf(option);
              return (
                <div
                  key={option.key}
                  id={`palette-${index}`}
                  role="option"
                  tabIndex={-1}
                  class="palette-option"
                  aria-selected={index === at}
                  onPointerMove={() => (active.value = index)}
                  onClick={() => run(option)}
                >
                  <span class="palette-label">{option.label}</span>
                  {option.keys !== undefined && (
                    <span class="palette-keys" aria-hidden="true">
                      <Keys keys={option.keys} />
                    </span>
                  )}
                </div>
              );
            })}
          </div>
        ))}
      </div>
    </Modal>
  );
}
