// KV pages of a conversation: the text on each page, and the branches whose prompts use it.

import { explainPrompt, type PromptCoverage } from "../api/rest";
import { type Branch, listBranches, NEXT_INPUT } from "./branchList";
import type { Thread } from "./thread";

export interface HeldPage {
  readonly text: string;
  readonly branches: readonly Branch[];
}

/** By place in the page map. */
export type HeldPages = ReadonlyMap<number, HeldPage>;

export const MAX_LOOKUPS = 16; // branches that are looked up, the newest ones

/** Look up the pages of all branches of a thread. A branch whose prompt the server refuses has none. */
export async function readHeldPages(thread: Thread, instructions: string): Promise<HeldPages> {
  let held: HeldPages = new Map();
  for (const branch of listBranches(thread.tree.value).slice(-MAX_LOOKUPS)) {
    // an answer is stored when its whole turn has ended
    const last = branch.path.findLast((message) => message.id.value !== null && !thread.turnOf(message)?.live);
    if (!last) continue;
    const system = thread.turnOf(last)?.settings.value?.instructions ?? instructions;
    const prompt = await explainPrompt({
      previous_item_id: last.id.value!,
      input: NEXT_INPUT,
      page_texts: true,
      ...(system === "" ? {} : { instructions: system }),
    }).catch(() => null);
    if (prompt) held = withBranch(held, branch, prompt.pages);
  }
  return held;
}

/** Add the pages of one branch. Of a page that is only partly the same, the longest text is kept. */
export function withBranch(held: HeldPages, branch: Branch, pages: PromptCoverage["pages"]): HeldPages {
  const all = new Map(held);
  for (const { map_index: place, text = "" } of pages) {
    if (place === null) continue;
    const before = all.get(place);
    const longest = before && before.text.length > text.length ? before.text : text;
    all.set(place, { text: longest, branches: [...(before?.branches ?? []), branch] });
  }
  return all;
}

/** Pages of each cell of the map that has some, in the order of the map. */
export function cellsOf(held: HeldPages, pagesPerCell: number): ReadonlyMap<number, readonly HeldPage[]> {
  const cells = new Map<number, HeldPage[]>();
  for (const [place, page] of [...held].sort(([a], [b]) => a - b)) {
    const cell = Math.floor(place / pagesPerCell);
    cells.set(cell, [...(cells.get(cell) ?? []), page]);
  }
  return cells;
}
