// Where every message of a conversation goes on the map: one row per turn of depth, one lane per branch. The oldest
// child goes on in its parent's lane, the others fork off to the right, into lanes that are free over their length. The
// places of old messages never change: what is chosen is a highlight, not another drawing.
import type { Message, Tree } from "../state/tree";

export interface MapNode {
  readonly message: Message;
  readonly depth: number; // row
  readonly lane: number;
  readonly parent: MapNode | null;
}

export interface BranchDrawing {
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
  const taken: [number, number][][] = []; // by lane: [first, last] rows
  const waiting: BranchStart[] = tree.childrenOf(null).map((message) => ({ message, parent: null })).reverse();
  let rows = 0;
  for (let start = waiting.pop(); start; start = waiting.pop()) {
    const chain = chainFrom(tree, start.message);
    const from = start.parent ? start.parent.depth + 1 : 0;
    const to = from + chain.length - 1;
    const lane = freeLane(taken, start.parent ? start.parent.lane + 1 : 0, from, to);
    (taken[lane] ??= []).push([from, to]);
    rows = Math.max(rows, to + 1);
    let above = start.parent;
    const forks: BranchStart[] = [];
    for (const message of chain) {
      const node: MapNode = { message, parent: above, lane, depth: above ? above.depth + 1 : 0 };
      nodes.set(message.key, node);
      for (const child of tree.childrenOf(message.key).slice(1).reverse()) forks.push({ message: child, parent: node });
      above = node;
    }
    waiting.push(...forks); // the deepest fork is placed first and lies nearest
  }
  return { nodes, rows, lanes: taken.length };
}

/** A message and its oldest descendants. */
function chainFrom(tree: Tree, start: Message): Message[] {
  const chain = [start];
  for (let at = tree.childrenOf(start.key)[0]; at; at = tree.childrenOf(at.key)[0]) chain.push(at);
  return chain;
}

function freeLane(taken: readonly (readonly [number, number][])[], first: number, from: number, to: number): number {
  let lane = first;
  while (taken[lane]?.some(([start, end]) => from <= end && start <= to)) lane++;
  return lane;
}

export type Step = "up" | "down" | "left" | "right" | "first" | "last";

/** Where an arrow key leads on the map: to the parent, to the chosen child, or to a sibling. */
export function neighbour(tree: Tree, message: Message, step: Step): Message | null {
  if (step === "up") return message.parent === null ? null : (tree.get(message.parent) ?? null);
  if (step === "down") return tree.chosenChild(message.key) ?? null;
  if (step === "first") return tree.path.value[0] ?? null;
  if (step === "last") return tree.leaf.value;
  const siblings = tree.siblings(message);
  return siblings[siblings.indexOf(message) + (step === "left" ? -1 : 1)] ?? null;
}
