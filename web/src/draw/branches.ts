// Layout of the branch map: one row per depth, one lane per branch. The oldest child continues in the lane of its
// parent, the others fork to the right into lanes that are free over their whole length. Positions do not depend on
// which branch is chosen; the chosen path is only highlighted.
import type { Message, Tree } from "../chat/tree";

export interface MapNode {
  readonly message: Message;
  readonly depth: number; // row
  readonly lane: number;
  readonly parent: MapNode | null;
}

interface BranchDrawing {
  readonly nodes: ReadonlyMap<string, MapNode>; // by message key, parents first
  readonly rows: number;
  readonly lanes: number;
}

interface BranchStart {
  readonly message: Message;
  readonly parent: MapNode | null;
}

export function drawBranches(tree: Tree): BranchDrawing {
  const nodes = new Map<string, MapNode>();
  const occupied: [number, number][][] = []; // by lane: [first, last] rows
  const stack: BranchStart[] = tree
    .childrenOf(null)
    .map((message) => ({ message, parent: null }))
    .reverse();
  let rows = 0;
  for (let start = stack.pop(); start; start = stack.pop()) {
    const chain = chainFrom(tree, start.message);
    const from = start.parent ? start.parent.depth + 1 : 0;
    const to = from + chain.length - 1;
    const lane = freeLane(occupied, start.parent ? start.parent.lane + 1 : 0, from, to);
    occupied[lane] ??= [];
    occupied[lane].push([from, to]);
    rows = Math.max(rows, to + 1);
    let above = start.parent;
    const forks: BranchStart[] = [];
    for (const message of chain) {
      const node: MapNode = { message, parent: above, lane, depth: above ? above.depth + 1 : 0 };
      nodes.set(message.key, node);
      for (const child of tree.childrenOf(message.key).slice(1).reverse()) forks.push({ message: child, parent: node });
      above = node;
    }
    stack.push(...forks); // the deepest fork is placed first, nearest to its parent
  }
  return { nodes, rows, lanes: occupied.length };
}

/** Return a message and its chain of oldest descendants. */
function chainFrom(tree: Tree, start: Message): Message[] {
  const chain = [start];
  for (let at = tree.childrenOf(start.key)[0]; at; at = tree.childrenOf(at.key)[0]) chain.push(at);
  return chain;
}

function freeLane(occupied: readonly (readonly [number, number][])[], first: number, from: number, to: number): number {
  let lane = first;
  while (occupied[lane]?.some(([start, end]) => from <= end && start <= to)) lane++;
  return lane;
}

export type Step = "up" | "down" | "left" | "right" | "first" | "last";

/** Return the target of an arrow key: the parent, the chosen child, or a sibling. */
export function neighbour(tree: Tree, message: Message, step: Step): Message | null {
  if (step === "up") return message.parent === null ? null : (tree.get(message.parent) ?? null);
  if (step === "down") return tree.chosenChild(message.key) ?? null;
  if (step === "first") return tree.path.value[0] ?? null;
  if (step === "last") return tree.leaf.value;
  const siblings = tree.siblings(message);
  return siblings[siblings.indexOf(message) + (step === "left" ? -1 : 1)] ?? null;
}

// -- Lines of the map: one path for the shown branch, one for all others

export const ROW_PX = 28;
const GRAPH_PX = 190; // maximum width of all lanes
const MAX_LANE_PX = 18;
const MIN_LANE_PX = 9;
const LEFT = 12;

export function laneWidth(lanes: number): number {
  return Math.max(MIN_LANE_PX, Math.min(MAX_LANE_PX, Math.floor(GRAPH_PX / Math.max(1, lanes))));
}

export function xOf(lane: number, laneWidthPx: number): number {
  return LEFT + lane * laneWidthPx;
}

export function yOf(depth: number): number {
  return depth * ROW_PX + ROW_PX / 2;
}

export function branchLines(
  nodes: readonly MapNode[],
  onPath: ReadonlySet<string>,
  laneWidthPx: number,
): { shown: string; other: string } {
  let [shown, other] = ["", ""];
  for (const node of nodes) {
    if (!node.parent) continue;
    const line = lineTo(node, node.parent, laneWidthPx);
    if (onPath.has(node.message.key)) shown += line;
    else other += line;
  }
  return { shown, other };
}

function lineTo(node: MapNode, parent: MapNode, laneWidthPx: number): string {
  const [x, y] = [xOf(node.lane, laneWidthPx), yOf(node.depth)];
  const [fromX, fromY] = [xOf(parent.lane, laneWidthPx), yOf(parent.depth)];
  if (x === fromX) return `M${fromX} ${fromY}V${y}`;
  const bend = Math.min(8, x - fromX);
  return `M${fromX} ${fromY}v${ROW_PX / 2 - bend}q0 ${bend} ${bend} ${bend}H${x - bend}q${bend} 0 ${bend} ${bend}V${y}`;
}
