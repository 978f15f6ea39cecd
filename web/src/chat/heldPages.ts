// KV pages of a conversation: the text on each page, and the branches whose prompts use it.

import { explainPrompt, type PromptCoverage } from "../api/rest";
import { type Branch, NEXT_INPUT } from "./branchList";

export interface HeldPage {
  readonly text: string;
  readonly branches: readonly Branch[];
}

/** By place in the page map. */
export type HeldPages = ReadonlyMap<number, HeldPage>;

export const MAX_LOOKUPS = 16; // branches that are looked up, the newest ones

/** Look up the pages of the branches. A branch whose prompt the server refuses has none. */
export async function readHeldPages(
  branches: readonly Branch[],
  instructionsOf: (branch: Branch) => string,
): Promise<HeldPages> {
  let held: HeldPages = new Map();
  for (const branch of branches.slice(-MAX_LOOKUPS)) {
    const id = branch.leaf.id.value;
    if (id === null) continue;
    const instructions = instructionsOf(branch);
    const prompt = await explainPrompt({
      previous_item_id: id,
      input: NEXT_INPUT,
      page_texts: true,
      ...(instructions === "" ? {} : { instructions }),
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
