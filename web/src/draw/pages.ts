// The page map as one SVG path per state. Each state has its own shape in addition to its colour.

type PageState = "shared" | "active" | "pinned" | "idle" | "other" | "free";

interface PageStateInfo {
  readonly code: string; // character in the API response
  readonly name: PageState;
  readonly label: string;
  readonly description: string;
  readonly shape: string; // path relative to the corner of a 10 x 10 cell
}

export const PAGE_STATES: readonly PageStateInfo[] = [
  {
    code: "s",
    name: "shared",
    label: "Shared",
    description: "used by several branches",
    shape: "m1 1h6v2h2v6h-6v-2h-2z",
  },
  { code: "a", name: "active", label: "Active", description: "used by one branch", shape: "m1 1h8v8h-8z" },
  {
    code: "p",
    name: "pinned",
    label: "Pinned",
    description: "kept permanently: a shared system prompt",
    shape: "m5 0.5l4.5 4.5l-4.5 4.5l-4.5 -4.5z",
  },
  { code: "i", name: "idle", label: "Idle", description: "cached, can be evicted", shape: "m1 1h8v8h-8zm2 2v4h4v-4z" },
  { code: "o", name: "other", label: "Other tenants", description: "pages of another tenant", shape: "m1 4h8v2h-8z" },
  { code: "f", name: "free", label: "Free", description: "not in use", shape: "m4 4h2v2h-2z" },
];

export const BOX = 10; // units per cell

const MAX_COLUMNS = 64;
const MIN_DRAWN = 256;

export function columnsFor(count: number): number {
  return Math.min(MAX_COLUMNS, Math.max(8, Math.ceil(Math.sqrt(count))));
}

/** Number of cells to draw: free cells after the last used one are left out. Doubles, to avoid frequent resizing. */
export function numDrawn(cells: string): number {
  let used = cells.length;
  while (used > 0 && cells[used - 1] === "f") used--;
  let drawn = MIN_DRAWN;
  while (drawn < used) drawn *= 2;
  return Math.min(drawn, cells.length);
}

/** Return the path of each state. */
export function pagePaths(cells: string, columns: number): ReadonlyMap<PageState, string> {
  return new Map(
    PAGE_STATES.map(({ code, name, shape }) => {
      let path = "";
      for (let at = cells.indexOf(code); at >= 0; at = cells.indexOf(code, at + 1))
        path += cellOrigin(at, columns) + shape;
      return [name, path];
    }),
  );
}

/** Return the cells that changed, as one path. */
export function changedPath(cells: string, before: string, columns: number): string {
  if (before.length !== cells.length) return "";
  return outlinePath(
    [...cells].flatMap((state, at) => (state === before[at] ? [] : [at])),
    columns,
  );
}

/** Return the whole boxes of some cells as one path. */
export function outlinePath(cells: Iterable<number>, columns: number): string {
  return Array.from(cells, (at) => `${cellOrigin(at, columns)}h10v10h-10z`).join("");
}

/** Return the cell at a point, given in fractions of the width and height of the drawing; null if there is none. */
export function cellAt(x: number, y: number, count: number, columns: number): number | null {
  const [column, row] = [Math.floor(x * columns), Math.floor(y * Math.ceil(count / columns))];
  const at = row * columns + column;
  return column >= 0 && column < columns && at >= 0 && at < count ? at : null;
}

export function countStates(cells: string): ReadonlyMap<PageState, number> {
  const counts = new Map<PageState, number>(PAGE_STATES.map(({ name }) => [name, 0]));
  const names = new Map(PAGE_STATES.map(({ code, name }) => [code, name]));
  for (const code of cells) {
    const name = names.get(code);
    if (name) counts.set(name, counts.get(name)! + 1);
  }
  return counts;
}

function cellOrigin(at: number, columns: number): string {
  return `M${(at % columns) * BOX} ${Math.floor(at / columns) * BOX}`;
}
