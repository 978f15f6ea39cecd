// Find in the conversation: over all messages of all branches. The current hit is scrolled to, and its branch is shown;
// the browser's highlights mark all hits in the rows on the screen without changing them.

import { computed, effect, signal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import type { Thread } from "../../chat/thread";
import type { Message } from "../../chat/tree";
import { useChat } from "../context";
import { Close, Left, Right } from "../icons";
import { findOpen, focusComposer, goToMessage, scrollToMessage } from "../navigation";
import { findHits, type Hit } from "./findHits";

const MAX_MARKED = 500; // ranges on the screen
const SEARCHED = ".user-text, .prose";

const query = signal("");
const at = signal(0);

export function Find() {
  const chat = useChat();
  const thread = chat.thread.value;
  const input = useRef<HTMLInputElement>(null);
  const visited = useRef(false);
  const hits = useRef(computed(() => hitsOf(chat.thread.value, query.value))).current;
  useLayoutEffect(() => {
    input.current?.focus();
    input.current?.select();
  }, []);
  useEffect(() => {
    at.value = 0;
    const first = hits.peek()[0]?.message;
    visited.current = first !== undefined && thread.tree.peek().path.peek().includes(first);
    if (visited.current) scrollToMessage(first!.key);
  }, [query.value, thread]);
  useEffect(() => {
    const stop = effect(() => {
      void [query.value, at.value, chat.thread.value.tree.value.path.value];
      requestAnimationFrame(() => mark(query.peek()));
    });
    const marks = new MutationObserver(() => mark(query.peek())); // rows come and go while the thread is scrolled
    const rows = document.querySelector(".thread");
    if (rows) marks.observe(rows, { childList: true, subtree: true });
    return () => {
      stop();
      marks.disconnect();
      CSS.highlights?.delete("found");
    };
  }, []);
  const found = hits.value;
  const go = (step: number) => {
    if (found.length === 0) return;
    if (visited.current) at.value = (at.value + step + found.length) % found.length;
    visited.current = true; // the first key goes to a first hit on another branch, which typing does not show
    goToMessage(chat, found[at.value]!.message);
  };
  const close = () => {
    findOpen.value = false;
    focusComposer();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.isComposing) return;
    if (event.key === "Escape") close();
    else if (event.key === "Enter") go(event.shiftKey ? -1 : 1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const shown = found[at.value];
  const isElsewhere = shown !== undefined && !thread.tree.value.path.value.includes(shown.message);
  return (
    <search class="find" onKeyDown={onKeyDown}>
      <input
        ref={input}
        class="text-input"
        type="text"
        aria-label="Find in this conversation"
        placeholder="Find in all branches"
        value={query.value}
        onInput={(event) => (query.value = event.currentTarget.value)}
      />
      <span class="find-count" role="status">
        {query.value.trim() === "" ? "" : found.length === 0 ? "none" : `${at.value + 1} of ${found.length}`}
        {isElsewhere ? ", on another branch" : ""}
      </span>
      <button type="button" class="tool" aria-label="Previous hit" disabled={found.length === 0} onClick={() => go(-1)}>
        <Left />
      </button>
      <button type="button" class="tool" aria-label="Next hit" disabled={found.length === 0} onClick={() => go(1)}>
        <Right />
      </button>
      <button type="button" class="tool" aria-label="Close the search" onClick={close}>
        <Close />
      </button>
    </search>
  );
}

/** The hits in tree order. A text that is being written is searched again when the tree or the words change. */
function hitsOf(thread: Thread, words: string): readonly Hit[] {
  const tree = thread.tree.value;
  void tree.path.value; // changes with every message
  const messages: Message[] = [];
  const waiting = [...tree.childrenOf(null)].reverse();
  for (let message = waiting.pop(); message; message = waiting.pop()) {
    messages.push(message);
    waiting.push(...[...tree.childrenOf(message.key)].reverse());
  }
  return findHits(messages, words);
}

/** Mark the words in the rows on the screen. */
function mark(words: string): void {
  if (!CSS.highlights) return;
  const wanted = words.trim().toLowerCase();
  const ranges: Range[] = [];
  for (const root of wanted === "" ? [] : document.querySelectorAll(SEARCHED)) {
    const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node && ranges.length < MAX_MARKED; node = texts.nextNode()) {
      const text = (node.textContent ?? "").toLowerCase();
      if (text.length !== node.textContent?.length) continue; // lower case has other lengths in a few languages
      for (let start = text.indexOf(wanted); start >= 0; start = text.indexOf(wanted, start + wanted.length)) {
        const range = new Range();
        range.setStart(node, start);
        range.setEnd(node, start + wanted.length);
        ranges.push(range);
      }
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}
