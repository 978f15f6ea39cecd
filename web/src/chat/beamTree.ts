// Tree of one beam search. Each node is one token and is sent once; the live beams end at some of the nodes.

import { signal } from "@preact/signals";
import type { WireBeamNode } from "../api/frames";

export interface BeamNode {
  readonly id: number;
  readonly parent: BeamNode | null;
  readonly text: string; // of this token only
  readonly score: number; // cumulative log-probability
  readonly depth: number; // in tokens
  readonly children: BeamNode[];
}

export class BeamTree {
  readonly root: BeamNode = { id: 0, parent: null, text: "", score: 0, depth: 0, children: [] };
  readonly version = signal(0); // read it to subscribe to changes
  private readonly nodes = new Map<number, BeamNode>([[0, this.root]]);
  private ends: readonly BeamNode[] = [];

  /** End nodes of the live beams, best first. */
  get live(): readonly BeamNode[] {
    return this.ends;
  }

  get size(): number {
    return this.nodes.size - 1;
  }

  /** Add nodes, parents first, and set the end nodes of the live beams, best first. */
  grow(nodes: readonly WireBeamNode[], live: readonly number[]): void {
    for (const { id, parent: above, text, score } of nodes) {
      if (this.nodes.has(id)) continue;
      // a parent may be missing if its frame was lost; show the node anyway
      const parent = this.nodes.get(above) ?? this.root;
      const node: BeamNode = { id, parent, text, score, depth: parent.depth + 1, children: [] };
      parent.children.push(node);
      this.nodes.set(id, node);
    }
    this.ends = live.map((id) => this.nodes.get(id)).filter((node) => node !== undefined);
    this.version.value++;
  }

  /** Text of the beam that ends at `node`. */
  textOf(node: BeamNode): string {
    return pathTo(node)
      .map((step) => step.text)
      .join("");
  }

  /** Last node that all these beams share, by default the live ones; the root if there is none. */
  agreed(ends = this.ends): BeamNode {
    const [first, ...others] = ends;
    if (!first) return this.root;
    let shared = pathTo(first);
    for (const end of others) {
      const path = pathTo(end);
      const parted = shared.findIndex((node, index) => path[index] !== node);
      if (parted >= 0) shared = shared.slice(0, parted);
    }
    return shared.at(-1) ?? this.root;
  }

  /** Text of the best beam after `solid`; empty if the beam does not start with it. */
  ghost(solid: string): string {
    const best = this.ends[0];
    const text = best ? this.textOf(best) : "";
    return text.startsWith(solid) ? text.slice(solid.length) : "";
  }

  /** Find the node whose path spells `text`, if there is one. */
  find(text: string): BeamNode | null {
    const open: { node: BeamNode; offset: number }[] = [{ node: this.root, offset: 0 }];
    for (let at = open.pop(); at; at = open.pop()) {
      const { node, offset } = at;
      if (offset === text.length && node !== this.root) return node;
      for (const child of node.children) {
        if (text.startsWith(child.text, offset)) open.push({ node: child, offset: offset + child.text.length });
      }
    }
    return null;
  }
}

/** Return the nodes from the first token to `node`. */
export function pathTo(node: BeamNode): BeamNode[] {
  const path: BeamNode[] = [];
  for (let at = node; at.parent; at = at.parent) path.push(at);
  return path.reverse();
}

/** Describe the likelihood of a beam relative to the best one. */
export function describeLikelihood(score: number, best: number): string {
  const times = Math.exp(best - score);
  if (times < 1.005) return "as likely as the best";
  if (times < 1.1) return "almost as likely as the best";
  if (times > 1000) return "over 1,000 times less likely than the best";
  return `${times < 10 ? times.toFixed(1) : Math.round(times)} times less likely than the best`;
}

/** Mean probability per token, in percent. */
export function percentPerToken(node: BeamNode): number {
  return node.depth === 0 ? 100 : Math.round(1000 * Math.exp(node.score / node.depth)) / 10;
}
