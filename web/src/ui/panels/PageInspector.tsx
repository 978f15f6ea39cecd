// The page map with the pages of the shown conversation marked: pointing at one, or walking to it by arrow keys, shows
// its text and the branches that use it.

import { useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import type { CacheMap } from "../../api/rest";
import { plural } from "../../app/format";
import { systemPrompt } from "../../app/settings";
import { branchName, listBranches, readMarks } from "../../chat/branchList";
import { cellsOf, type HeldPage, type HeldPages, readHeldPages } from "../../chat/heldPages";
import { BOX, cellAt, outlinePath, PAGE_STATES } from "../../draw/pages";
import { Poller } from "../../server/poller";
import { useChat } from "../context";
import { goToMessage } from "../navigation";

const POLL_MS = 5000; // pages are evicted and written anew; each changes the map
const GONE = "fo"; // free, or another tenant's: evicted since the last look-up
const NO_PAGES: HeldPages = new Map();
const STEPS: Readonly<Record<string, number>> = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

interface InspectorProps {
  readonly map: CacheMap;
  readonly drawn: number; // cells
  readonly columns: number;
  readonly children: ComponentChildren; // the drawing
}

export function PageInspector({ map, drawn, columns, children }: InspectorProps) {
  const chosen = useSignal<number | null>(null); // cell
  const cells = cellsOf(useHeldPages(map.cells), map.pages_per_cell);
  const own = [...cells.keys()].filter((cell) => cell < drawn && !GONE.includes(map.cells[cell]!));
  const at = chosen.value !== null && own.includes(chosen.value) ? chosen.value : null;
  const pages = at === null ? null : cells.get(at)!;
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
    const step = STEPS[event.key];
    const next =
      event.key === "Home"
        ? 0
        : event.key === "End"
          ? own.length - 1
          : step && (at === null ? 0 : own.indexOf(at) + step);
    if (next === undefined) return;
    event.preventDefault();
    chosen.value = own[Math.min(own.length - 1, Math.max(0, next))]!;
  };
  const onPointer = (event: PointerEvent) => {
    const box = (event.currentTarget as SVGElement).getBoundingClientRect();
    const cell = cellAt((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height, drawn, columns);
    if (cell !== null && own.includes(cell)) chosen.value = cell;
  };
  const state = PAGE_STATES.find(({ code }) => at !== null && code === map.cells[at])?.label ?? "";
  const slider =
    own.length === 0
      ? {}
      : {
          role: "slider" as const,
          tabIndex: 0,
          "aria-label": "Pages of this conversation",
          "aria-valuemin": 1,
          "aria-valuemax": own.length,
          "aria-valuenow": at === null ? 1 : own.indexOf(at) + 1,
          "aria-valuetext": pages === null ? "none chosen" : describePages(state, pages),
          onKeyDown,
          onFocus: () => (chosen.value ??= own[0]!),
        };
  return (
    <>
      <div class="kv-page-frame" {...slider}>
        <svg
          class="kv-page-map"
          viewBox={`0 0 ${columns * BOX} ${Math.ceil(drawn / columns) * BOX}`}
          aria-hidden="true"
          onPointerMove={onPointer}
          onPointerDown={onPointer}
        >
          {children}
          {own.length > 0 && <path class="page-own" d={outlinePath(own, columns)} />}
          {at !== null && <path class="page-chosen" d={outlinePath([at], columns)} />}
        </svg>
      </div>
      {own.length > 0 && (
        <div class="page-details">
          {pages === null ? (
            <p class="hint">Outlined: pages of this conversation. Point at one to see its text.</p>
          ) : (
            pages.map((page) => <PageDetails key={page} page={page} state={state} />)
          )}
        </div>
      )}
    </>
  );
}

/** The pages of the shown conversation, looked up anew when the map has changed. */
function useHeldPages(map: string): HeldPages {
  const chat = useChat();
  const thread = chat.thread.value;
  const live = chat.live.value;
  const leaf = thread.tree.value.leaf.value;
  const changes = useRef(0); // of the map
  useEffect(() => void changes.current++, [map]);
  const watch = useMemo(() => {
    let [held, seen] = [NO_PAGES, -1];
    const read = async () => {
      const now = changes.current;
      if (now !== seen) held = await readHeldPages(thread, systemPrompt.peek());
      seen = now;
      return held;
    };
    return new Poller(read, POLL_MS);
  }, [thread, live, leaf]);
  const isStored = thread.id.value !== null && leaf !== null;
  useEffect(() => (isStored ? watch.start() : undefined), [watch, isStored]);
  return watch.current.value ?? NO_PAGES;
}

function PageDetails({ page, state }: { page: HeldPage; state: string }) {
  const chat = useChat();
  const thread = chat.thread.value;
  const all = listBranches(thread.tree.value).map(({ leaf }) => leaf);
  const marks = readMarks(thread.id.value === null ? null : chat.conversations.find(thread.id.value)?.metadata);
  return (
    <>
      <p class="page-text" dir="auto">
        {page.text}
      </p>
      <p class="page-holders">
        <span class="hint">
          {state}, used by {plural(page.branches.length, "branch", "branches")}:
        </span>{" "}
        {page.branches.map((branch) => (
          <button key={branch.leaf.key} type="button" class="link" onClick={() => goToMessage(chat, branch.leaf)}>
            {branchName(branch, all.indexOf(branch.leaf) + 1, marks)}
          </button>
        ))}
      </p>
    </>
  );
}

function describePages(state: string, pages: readonly HeldPage[]): string {
  return pages
    .map(({ text, branches }) => `${state}, used by ${plural(branches.length, "branch", "branches")}: ${text}`)
    .join(" ");
}
