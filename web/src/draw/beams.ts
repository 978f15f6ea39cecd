// Where everything of a beam tree goes. Text runs to the right in cells of one width; every live beam has a lane of its
// own, what all agree on keeps the top one, and dropped beams lie where room is left, or become a tick.
//
//   There was once a dragon ─┬ called Kai ── who lived      lane 0: the trunk, then its first-born child
//                  ╰ king    ╰ in the ─┬ edge of the        lane 1: "king" was dropped; then a live beam
//                                      ╰ city               lane 2
import { CELL_PX, countCells, singleLine, truncate } from "../app/format";
import type { BeamNode, BeamTree } from "../chat/beamTree";

export const LANE = 30; // px
export const CURVE = 18; // px from where a beam forks off to where its text begins
const MAX_DROPPED_LANES = 4; // a dropped beam goes no further from its parent than this
const DROPPED_CHARS = 22; // shown of it

export type Kind = "agreed" | "open" | "dead";

interface NodeStyle {
  readonly kind: Kind;
  readonly highlighted: boolean; // the first of the beams that count runs through it
}

export interface Piece extends NodeStyle {
  readonly key: string;
  readonly lane: number;
  readonly x: number;
  readonly width: number;
  readonly text: string;
}

export interface Join extends NodeStyle {
  readonly key: string;
  readonly x: number;
  readonly from: number; // lanes
  readonly to: number;
}

export interface Point {
  readonly lane: number;
  readonly x: number;
}

export interface BeamDrawing {
  readonly pieces: readonly Piece[];
  readonly joins: readonly Join[];
  readonly ticks: readonly Point[]; // where a beam was dropped that found no room
  readonly ends: ReadonlyMap<BeamNode, Point>; // of the live beams
  readonly lanes: number;
  readonly width: number; // px
}

interface Fork extends Point {
  readonly child: BeamNode; // forks off at x, from lane
}

/** `alive`: the ends of the beams that count, best first. */
export function drawBeams(tree: BeamTree, alive: readonly BeamNode[] = tree.live): BeamDrawing {
  const looks = new NodeStyles(tree, alive);
  const grown = layoutLiveBeams(tree, looks, alive);
  return layoutDroppedBeams(grown, looks);
}

/** What of a drawing lies between two places: a search may be thousands of characters wide, a panel shows fifty. */
export function clipDrawing(drawing: BeamDrawing, from: number, to: number): BeamDrawing {
  const near = ({ x }: { readonly x: number }) => x > from - CURVE && x < to;
  return {
    ...drawing,
    pieces: drawing.pieces
      .filter(({ x, width }) => x + width > from && x < to)
      .map((piece) => clipPiece(piece, from, to)),
    joins: drawing.joins.filter(near),
    ticks: drawing.ticks.filter(near),
  };
}

function clipPiece(piece: Piece, from: number, to: number): Piece {
  if (piece.x >= from && piece.x + piece.width <= to) return piece;
  let [x, width, text] = [piece.x, 0, ""];
  for (const character of piece.text) {
    const wide = countCells(character) * CELL_PX;
    if (x + width + wide <= from) x += wide;
    else if (x + width < to) {
      text += character;
      width += wide;
    } else break;
  }
  return { ...piece, x, width, text };
}

/** What every node is: agreed on, open or dropped. */
class NodeStyles {
  readonly alive = new Set<BeamNode>();
  private readonly bestPath = new Set<BeamNode>();
  private readonly agreed = new Set<BeamNode>();

  constructor(tree: BeamTree, ends: readonly BeamNode[]) {
    for (const end of ends) {
      for (let at: BeamNode | null = end; at && !this.alive.has(at); at = at.parent) this.alive.add(at);
    }
    for (let at: BeamNode | null = ends[0] ?? null; at; at = at.parent) this.bestPath.add(at);
    for (let at = tree.root; !ends.includes(at); ) {
      const [only, second] = at.children.filter((child) => this.alive.has(child));
      if (!only || second) break;
      this.agreed.add(only);
      at = only;
    }
  }

  of(node: BeamNode): NodeStyle {
    const kind = this.agreed.has(node) ? "agreed" : this.alive.has(node) ? "open" : "dead";
    return { kind, highlighted: this.bestPath.has(node) };
  }

  /** The child that goes on in its parent's lane: the first-born that lives. */
  mainChild(node: BeamNode): BeamNode | null {
    return node.children.find((child) => this.alive.has(child)) ?? null;
  }
}

interface Layout {
  readonly pieces: Piece[];
  readonly joins: Join[];
  readonly ends: Map<BeamNode, Point>;
  readonly occupied: { readonly lane: number; readonly from: number; readonly to: number }[];
  readonly dropped: Fork[];
  lanes: number;
  width: number;
}

/** Lanes of the live beams. Of a lane's forks the rightmost takes the next lane, so that no line crosses another. */
function layoutLiveBeams(tree: BeamTree, looks: NodeStyles, alive: readonly BeamNode[]): Layout {
  const grown: Layout = { pieces: [], joins: [], ends: new Map(), occupied: [], dropped: [], lanes: 0, width: 0 };
  const waiting: Fork[] = []; // taken from its end
  const aside = (node: BeamNode, x: number, lane: number) => {
    const heir = looks.mainChild(node);
    for (const child of node.children.toReversed()) {
      if (child !== heir) (looks.alive.has(child) ? waiting : grown.dropped).push({ child, x, lane });
    }
    return heir;
  };
  const first = aside(tree.root, 0, 0);
  if (first) waiting.push({ child: first, x: 0, lane: 0 });
  for (let side = waiting.pop(); side; side = waiting.pop()) {
    const lane = grown.lanes++;
    if (lane > 0) addJoin(grown, looks, side, lane);
    const from = side.x + CURVE;
    let x = from;
    let run: BeamNode[] = [];
    for (let node: BeamNode | null = side.child; node; ) {
      run.push(node);
      const end: number = x + countCells(singleLine(node.text)) * CELL_PX;
      const next = aside(node, end, lane);
      if (alive.includes(node)) grown.ends.set(node, { x: end, lane });
      if (!next || !sameStyle(looks.of(node), looks.of(next))) {
        const text = singleLine(run.map((step) => step.text).join(""));
        const start = end - countCells(text) * CELL_PX;
        grown.pieces.push({ key: `p${run[0]!.id}`, ...looks.of(node), lane, x: start, width: end - start, text });
        run = [];
      }
      [node, x] = [next, end];
    }
    grown.occupied.push({ lane, from: side.x, to: x + CELL_PX });
    grown.width = Math.max(grown.width, x);
  }
  return grown;
}

/** Dropped beams, the longest first: one that was open for long is worth more room than one that fell at once. */
function layoutDroppedBeams(grown: Layout, looks: NodeStyles): BeamDrawing {
  const lanes = new LaneGrid(grown.width + CURVE + 2 * DROPPED_CHARS * CELL_PX);
  for (const { lane, from, to } of grown.occupied) lanes.occupy(lane, from, to);
  const ticks: Point[] = [];
  const dead = grown.dropped.map((side) => ({ side, text: droppedText(side.child) }));
  dead.sort((a, b) => b.text.length - a.text.length || b.side.x - a.side.x);
  for (const { side, text } of dead) {
    const width = countCells(text) * CELL_PX;
    const end = side.x + CURVE + width;
    const lane = findFreeLane(lanes, side, end + CELL_PX);
    if (lane === null) {
      ticks.push({ lane: side.lane, x: side.x });
      continue;
    }
    addJoin(grown, looks, side, lane);
    for (let between = side.lane + 1; between < lane; between++) lanes.occupy(between, side.x, side.x + CURVE);
    lanes.occupy(lane, side.x, end + CELL_PX);
    grown.pieces.push({
      key: `d${side.child.id}`,
      kind: "dead",
      highlighted: false,
      lane,
      x: side.x + CURVE,
      width,
      text,
    });
    grown.lanes = Math.max(grown.lanes, lane + 1);
    grown.width = Math.max(grown.width, end);
  }
  const { pieces, joins, ends, width } = grown;
  return { pieces, joins, ticks, ends, lanes: grown.lanes, width };
}

/** The nearest lane that is free up to `end` and whose line to it crosses nothing; null if there is none. */
function findFreeLane(lanes: LaneGrid, side: Fork, end: number): number | null {
  for (let lane = side.lane + 1; lane <= side.lane + MAX_DROPPED_LANES; lane++) {
    if (lanes.isFree(lane, side.x, end)) return lane;
    if (!lanes.isFree(lane, side.x, side.x + CURVE)) return null;
  }
  return null;
}

function addJoin(grown: Layout, looks: NodeStyles, side: Fork, lane: number): void {
  const { child, x } = side;
  grown.joins.push({ key: `j${child.id}`, ...looks.of(child), x, from: side.lane, to: lane });
  for (let between = side.lane + 1; between < lane; between++)
    grown.occupied.push({ lane: between, from: x, to: x + CURVE });
}

function sameStyle(a: NodeStyle, b: NodeStyle): boolean {
  return a.kind === b.kind && a.highlighted === b.highlighted;
}

/** What a dropped beam said along its first children, cut short. */
function droppedText(start: BeamNode): string {
  let text = "";
  for (let node: BeamNode | undefined = start; node && text.length <= DROPPED_CHARS; node = node.children[0])
    text += node.text;
  return truncate(singleLine(text), DROPPED_CHARS);
}

// ---- Which cells of which lane hold something already.

class LaneGrid {
  private readonly rows: Uint8Array[] = [];
  private readonly columns: number;

  constructor(width: number) {
    this.columns = Math.ceil(width / CELL_PX) + 1;
  }

  occupy(lane: number, from: number, to: number): void {
    this.rows[lane] ??= new Uint8Array(this.columns);
    this.rows[lane].fill(1, Math.max(0, Math.floor(from / CELL_PX)), Math.ceil(to / CELL_PX));
  }

  isFree(lane: number, from: number, to: number): boolean {
    const row = this.rows[lane];
    if (!row) return true;
    const end = Math.min(this.columns, Math.ceil(to / CELL_PX));
    for (let cell = Math.max(0, Math.floor(from / CELL_PX)); cell < end; cell++) if (row[cell]) return false;
    return true;
  }
}
