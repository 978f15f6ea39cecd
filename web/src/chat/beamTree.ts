// The beams of one search as a tree that grows: every node is one token, told once; some nodes end a live beam.

import { signal } from "@preact/signals";
import type { WireBeamNode } from "../api/frames";

export interface BeamNode {
  readonly id: number;
  readonly parent: BeamNode | null;
  readonly text: string; // of this token alone
  readonly score: number; // log-probability of everything up to here
  readonly depth: number; // tokens
  readonly children: BeamNode[];
}

export class BeamTree {
  readonly root: BeamNode = { id: 0, parent: null, text: "", score: 0, depth: 0, children: [] };
  readonly version = signal(0); // read it to hear of growth
  private readonly nodes = new Map<number, BeamNode>([[0, this.root]]);
  private ends: readonly BeamNode[] = [];

  /** Ends of the live beams, best first. */
  get live(): readonly BeamNode[] {
    return this.ends;
  }

  get size(): number {
    return this.nodes.size - 1;
  }

  /** Take new nodes, parents first, and which ones end live beams now, best first. */
  grow(nodes: readonly WireBeamNode[], live: readonly number[]): void {
    for (const { id, parent: above, text, score } of nodes) {
      if (this.nodes.has(id)) continue;
      const parent = this.nodes.get(above) ?? this.root; // what we were not told of is missing, the rest still shows
      const node: BeamNode = { id, parent, text, score, depth: parent.depth + 1, children: [] };
      parent.children.push(node);
      this.nodes.set(id, node);
    }
    this.ends = live.map((id) => this.nodes.get(id)).filter((node) => node !== undefined);
    this.version.value++;
  }

  /** Everything that the beam ending at `node` says. */
  textOf(node: BeamNode): string {
    return pathTo(node)
      .map((step) => step.text)
      .join("");
  }

  /** The last node that all live beams share; the root before the first. */
  agreed(): BeamNode {
    const [first, ...others] = this.ends;
    if (!first) return this.root;
    let shared = pathTo(first);
    for (const end of others) {
      const path = pathTo(end);
      const parted = shared.findIndex((node, index) => path[index] !== node);
      if (parted >= 0) shared = shared.slice(0, parted);
    }
    return shared.at(-1) ?? this.root;
  }

  /** What the best beam says beyond `solid`; empty where it says something else. */
  ghost(solid: string): string {
    const best = this.ends[0];
    const text = best ? this.textOf(best) : "";
    return text.startsWith(solid) ? text.slice(solid.length) : "";
  }

  /** The node down to which the tree spells a finished text, if it does. */
  find(text: string): BeamNode | null {
    const open: { node: BeamNode; said: number }[] = [{ node: this.root, said: 0 }];
    for (let at = open.pop(); at; at = open.pop()) {
      const { node, said } = at;
      if (said === text.length && node !== this.root) return node;
      for (const child of node.children) {
        if (text.startsWith(child.text, said)) open.push({ node: child, said: said + child.text.length });
      }
    }
    return null;
  }
}

/** The nodes from the first token to `node`. */
export function pathTo(node: BeamNode): BeamNode[] {
  const path: BeamNode[] = [];
  for (let at = node; at.parent; at = at.parent) path.push(at);
  return path.reverse();
}

/** How likely a beam is beside the best one, in words. */
export function describeLikelihood(score: number, best: number): string {
  const times = Math.exp(best - score);
  if (times < 1.005) return "as likely as the best";
  if (times < 1.1) return "almost as likely as the best";
  if (times > 1000) return "over 1,000 times less likely than the best";
  return `${times < 10 ? times.toFixed(1) : Math.round(times)} times less likely than the best`;
}

/** Its mean probability per token, in percent. */
export function percentPerToken(node: BeamNode): number {
  return node.depth === 0 ? 100 : Math.round(1000 * Math.exp(node.score / node.depth)) / 10;
}
