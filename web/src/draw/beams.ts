// Layout of a beam tree. Text runs to the right in cells of equal width. Each live beam has its own lane, the common
// part is in the top lane, and dropped beams use free space or become a tick.
//
//   There was once a dragon ─┬ called Kai ── who lived      lane 0: the trunk, then its oldest child
//                  ╰ king    ╰ in the ─┬ edge of the        lane 1: "king" was dropped; then a live beam
//                                      ╰ city               lane 2
import { CELL_PX, countCells, singleLine, truncate } from "../app/format";
import type { BeamNode, BeamTree } from "../chat/beamTree";

export const LANE_PX = 30;
export const CURVE_PX = 18; // between a fork and the text after it
const MAX_DROPPED_LANES = 4; // maximum distance of a dropped beam from its parent
const DROPPED_CHARS = 22; // maximum text of a dropped beam

type Kind = "agreed" | "open" | "dropped";

interface NodeStyle {
  readonly kind: Kind;
  readonly highlighted: boolean; // on the path of the best beam
}

interface Piece extends NodeStyle {
  readonly key: string;
  readonly lane: number;
  readonly x: number;
  readonly width: number;
  readonly text: string;
}

export interface Join extends NodeStyle {
  readonly key: string;
  readonly x: number;
  readonly from: number; // lane
  readonly to: number;
}

interface Point {
  readonly lane: number;
  readonly x: number;
}

export interface BeamDrawing {
  readonly pieces: readonly Piece[];
  readonly joins: readonly Join[];
  readonly ticks: readonly Point[]; // dropped beams without space for text
  readonly ends: ReadonlyMap<BeamNode, Point>; // ends of the live beams
  readonly lanes: number;
  readonly width: number; // in px
}

interface Fork extends Point {
  readonly child: BeamNode; // forks off at x, from lane
}

/** Lay out the tree; `alive` are the end nodes of the beams to show as live, best first. */
export function drawBeams(tree: BeamTree, alive: readonly BeamNode[] = tree.live): BeamDrawing {
  const styles = new NodeStyles(tree, alive);
  const layout = layoutLiveBeams(tree, styles, alive);
  return layoutDroppedBeams(layout, styles);
}

/** Return the part of a drawing between two x positions: a tree may be far wider than the panel. */
export function clipDrawing(drawing: BeamDrawing, from: number, to: number): BeamDrawing {
  const near = ({ x }: { readonly x: number }) => x > from - CURVE_PX && x < to;
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
    const charWidth = countCells(character) * CELL_PX;
    if (x + width + charWidth <= from) x += charWidth;
    else if (x + width < to) {
      text += character;
      width += charWidth;
    } else break;
  }
  return { ...piece, x, width, text };
}

/** Style of each node: agreed, open or dropped. */
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
    const kind = this.agreed.has(node) ? "agreed" : this.alive.has(node) ? "open" : "dropped";
    return { kind, highlighted: this.bestPath.has(node) };
  }

  /** The child that continues in the lane of its parent: the first live one. */
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

/** Assign lanes to the live beams. The rightmost fork of a lane gets the next lane, so that no lines cross. */
function layoutLiveBeams(tree: BeamTree, styles: NodeStyles, alive: readonly BeamNode[]): Layout {
  const layout: Layout = { pieces: [], joins: [], ends: new Map(), occupied: [], dropped: [], lanes: 0, width: 0 };
  const stack: Fork[] = [];
  const queueForks = (node: BeamNode, x: number, lane: number) => {
    const main = styles.mainChild(node);
    for (const child of node.children.toReversed()) {
      if (child !== main) (styles.alive.has(child) ? stack : layout.dropped).push({ child, x, lane });
    }
    return main;
  };
  const first = queueForks(tree.root, 0, 0);
  if (first) stack.push({ child: first, x: 0, lane: 0 });
  for (let fork = stack.pop(); fork; fork = stack.pop()) {
    const lane = layout.lanes++;
    if (lane > 0) addJoin(layout, styles, fork, lane);
    const from = fork.x + CURVE_PX;
    let x = from;
    let run: BeamNode[] = [];
    for (let node: BeamNode | null = fork.child; node; ) {
      run.push(node);
      const end: number = x + countCells(singleLine(node.text)) * CELL_PX;
      const next = queueForks(node, end, lane);
      if (alive.includes(node)) layout.ends.set(node, { x: end, lane });
      if (!next || !sameStyle(styles.of(node), styles.of(next))) {
        const text = singleLine(run.map((step) => step.text).join(""));
        const start = end - countCells(text) * CELL_PX;
        layout.pieces.push({ key: `p${run[0]!.id}`, ...styles.of(node), lane, x: start, width: end - start, text });
        run = [];
      }
      [node, x] = [next, end];
    }
    layout.occupied.push({ lane, from: fork.x, to: x + CELL_PX });
    layout.width = Math.max(layout.width, x);
  }
  return layout;
}

/** Place dropped beams, longest first, so that the longest-lived ones get the space. */
function layoutDroppedBeams(layout: Layout, styles: NodeStyles): BeamDrawing {
  const lanes = new LaneGrid(layout.width + CURVE_PX + 2 * DROPPED_CHARS * CELL_PX);
  for (const { lane, from, to } of layout.occupied) lanes.occupy(lane, from, to);
  const ticks: Point[] = [];
  const dropped = layout.dropped.map((fork) => ({ fork, text: droppedText(fork.child) }));
  dropped.sort((a, b) => b.text.length - a.text.length || b.fork.x - a.fork.x);
  for (const { fork, text } of dropped) {
    const width = countCells(text) * CELL_PX;
    const end = fork.x + CURVE_PX + width;
    const lane = findFreeLane(lanes, fork, end + CELL_PX);
    if (lane === null) {
      ticks.push({ lane: fork.lane, x: fork.x });
      continue;
    }
    addJoin(layout, styles, fork, lane);
    for (let between = fork.lane + 1; between < lane; between++) lanes.occupy(between, fork.x, fork.x + CURVE_PX);
    lanes.occupy(lane, fork.x, end + CELL_PX);
    layout.pieces.push({
      key: `d${fork.child.id}`,
      kind: "dropped",
      highlighted: false,
      lane,
      x: fork.x + CURVE_PX,
      width,
      text,
    });
    layout.lanes = Math.max(layout.lanes, lane + 1);
    layout.width = Math.max(layout.width, end);
  }
  const { pieces, joins, ends, width } = layout;
  return { pieces, joins, ticks, ends, lanes: layout.lanes, width };
}

/** Find the nearest lane that is free up to `end` and whose connection crosses nothing; null if there is none. */
function findFreeLane(lanes: LaneGrid, fork: Fork, end: number): number | null {
  for (let lane = fork.lane + 1; lane <= fork.lane + MAX_DROPPED_LANES; lane++) {
    if (lanes.isFree(lane, fork.x, end)) return lane;
    if (!lanes.isFree(lane, fork.x, fork.x + CURVE_PX)) return null;
  }
  return null;
}

function addJoin(layout: Layout, styles: NodeStyles, fork: Fork, lane: number): void {
  const { child, x } = fork;
  layout.joins.push({ key: `j${child.id}`, ...styles.of(child), x, from: fork.lane, to: lane });
  for (let between = fork.lane + 1; between < lane; between++)
    layout.occupied.push({ lane: between, from: x, to: x + CURVE_PX });
}

function sameStyle(a: NodeStyle, b: NodeStyle): boolean {
  return a.kind === b.kind && a.highlighted === b.highlighted;
}

/** Text of a dropped beam along its first children, truncated. */
function droppedText(start: BeamNode): string {
  let text = "";
  for (let node: BeamNode | undefined = start; node && text.length <= DROPPED_CHARS; node = node.children[0])
    text += node.text;
  return truncate(singleLine(text), DROPPED_CHARS);
}

// -- Occupied cells of each lane

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
