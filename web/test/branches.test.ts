import { describe, expect, test } from "vitest";
import { Tree } from "../src/chat/tree";
import { branchLines, drawBranches, laneWidth, neighbour } from "../src/draw/branches";

/** Build a tree from "key parent" lines, oldest first; "-" is the root. */
function treeOf(lines: string): Tree {
  const tree = new Tree();
  for (const line of lines.trim().split("\n")) {
    const [key, parent] = line.trim().split(" ") as [string, string];
    tree.add({ key, parent: parent === "-" ? null : parent, role: key.startsWith("u") ? "user" : "assistant" });
  }
  return tree;
}

function places(tree: Tree): Record<string, [number, number]> {
  return Object.fromEntries([...drawBranches(tree).nodes].map(([key, { depth, lane }]) => [key, [depth, lane]]));
}

const TALK = "u1 -\na1 u1\nu2 a1\na2 u2\na2b u2\na2c u2\nu3 a2\na3 u3\nu2x a1\na2x u2x";

describe("drawBranches", () => {
  test("continues the oldest child in its lane, forks siblings to the right, and reuses lanes", () => {
    expect(places(treeOf(TALK))).toEqual({
      u1: [0, 0],
      a1: [1, 0],
      u2: [2, 0],
      a2: [3, 0],
      u3: [4, 0],
      a3: [5, 0],
      a2b: [3, 1],
      a2c: [3, 2],
      u2x: [2, 3],
      a2x: [3, 3],
    });
  });

  test("separates two branches that end and start in one lane", () => {
    const tree = treeOf("u1 -\na1 u1\nb1 u1\nu2 a1\na2 u2\nb2 u2");
    expect(places(tree)).toMatchObject({ b1: [1, 1], b2: [3, 1] });
  });

  test("does not move messages when another branch is chosen", () => {
    const tree = treeOf(TALK);
    const before = places(tree);
    tree.reveal(tree.get("a2c")!);
    expect(places(tree)).toEqual(before);
  });

  test("gives 1000 messages distinct positions, each directly below its parent", () => {
    const tree = new Tree();
    let state = 7;
    const next = (below: number) => {
      state = (Math.imul(state, 1103515245) + 12345) >>> 0;
      return state % below;
    };
    for (let index = 0; index < 1000; index++) {
      const parent = index === 0 || next(40) === 0 ? null : `m${next(3) ? index - 1 : next(index)}`;
      tree.add({ key: `m${index}`, parent, role: index % 2 ? "assistant" : "user" });
    }
    const { nodes, rows, lanes } = drawBranches(tree);
    expect(nodes.size).toBe(1000);
    expect(new Set([...nodes.values()].map(({ depth, lane }) => `${depth} ${lane}`)).size).toBe(1000);
    for (const { message, depth, lane, parent } of nodes.values()) {
      expect(parent?.message.key ?? null).toBe(message.parent);
      expect(depth).toBe(parent ? parent.depth + 1 : 0);
      expect(lane).toBeGreaterThanOrEqual(parent?.lane ?? 0);
      expect(depth < rows && lane < lanes).toBe(true);
    }
  });

  test("neighbour follows arrow keys along the tree", () => {
    const tree = treeOf(TALK);
    tree.reveal(tree.get("a3")!);
    const walk = (key: string, step: Parameters<typeof neighbour>[2]) =>
      neighbour(tree, tree.get(key)!, step)?.key ?? null;
    expect(walk("u2", "up")).toBe("a1");
    expect(walk("u1", "up")).toBeNull();
    expect(walk("a1", "down")).toBe("u2");
    expect(walk("a3", "down")).toBeNull();
    expect(walk("a2", "right")).toBe("a2b");
    expect(walk("a2", "left")).toBeNull();
    expect(walk("u2x", "left")).toBe("u2");
    expect([walk("a2x", "first"), walk("a2x", "last")]).toEqual(["u1", "a3"]);
  });

  test("branchLines draws each connection once, the shown path separately", () => {
    const tree = treeOf(TALK);
    tree.reveal(tree.get("a2x")!);
    const { nodes } = drawBranches(tree);
    const lines = branchLines([...nodes.values()], new Set(tree.path.value.map(({ key }) => key)), laneWidth(4));
    expect(lines.shown.split("M").length - 1).toBe(3);
    expect(lines.other.split("M").length - 1).toBe(6);
  });
});
