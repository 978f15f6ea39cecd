import { describe, expect, test } from "vitest";
import { CELL_PX, countCells, singleLine, truncate } from "../src/app/format";
import { type BeamNode, BeamTree, describeLikelihood, pathTo, percentPerToken } from "../src/chat/beamTree";
import { type BeamDrawing, CURVE_PX, clipDrawing, drawBeams } from "../src/draw/beams";

/** Build a tree from lines of "id parent text". */
function treeOf(lines: string, live: number[]): BeamTree {
  const tree = new BeamTree();
  const nodes = lines
    .trim()
    .split("\n")
    .map((line) => {
      const [, id, parent, text] = /^\s*(\d+) (\d+) ?(.*)$/.exec(line)!;
      return { id: Number(id), parent: Number(parent), text: text!.replaceAll("_", " "), score: -Number(id) / 10 };
    });
  tree.grow(nodes, live);
  return tree;
}

/** Deterministic pseudo-random numbers. */
function numbers(seed: number): () => number {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/** Simulate a search with random choices: each beam has up to three children, the best `width` survive a step. */
function grown(seed: number, width: number, steps: number): BeamTree {
  const next = numbers(seed);
  const tree = new BeamTree();
  let beams = [{ id: 0, score: 0 }];
  let id = 0;
  for (let step = 0; step < steps; step++) {
    const children = beams.flatMap((beam) =>
      [0, 1, 2]
        .slice(0, 1 + Math.floor(next() * 3))
        .map(() => ({
          id: ++id,
          parent: beam.id,
          text: ` ${"abcdefgh".slice(0, 1 + Math.floor(next() * 6))}`,
          score: beam.score - next(),
        })),
    );
    children.sort((a, b) => b.score - a.score);
    beams = children.slice(0, width);
    tree.grow(
      children.slice(0, width),
      beams.map((beam) => beam.id),
    );
  }
  return tree;
}

describe("BeamTree", () => {
  const TREE = "1 0 Once\n2 1 _upon\n3 1 _there\n4 2 _a\n5 3 _was\n6 5 _a";

  test("agreed returns the last node shared by all live beams", () => {
    const tree = treeOf(TREE, [4, 6]);
    expect(tree.textOf(tree.agreed())).toBe("Once");
    tree.grow([], [6]);
    expect(tree.textOf(tree.agreed())).toBe("Once there was a");
    tree.grow([], []);
    expect(tree.agreed()).toBe(tree.root);
  });

  test("agreed of kept beams does not depend on the live ones", () => {
    const tree = new BeamTree();
    const nodes = ["Once", " upon", " a", " there"].map((text, at) => ({ id: at + 1, parent: at, text, score: 0 }));
    tree.grow([...nodes.slice(0, 3), { ...nodes[3]!, parent: 1 }], [3]);
    const kept = [" a", " there"].map((end) => tree.find(end === " a" ? "Once upon a" : `Once${end}`)!);
    expect(tree.textOf(tree.agreed())).toBe("Once upon a");
    expect(tree.textOf(tree.agreed(kept))).toBe("Once");
  });

  test("agreed returns a beam that is the beginning of another", () => {
    const tree = treeOf(TREE, [3, 6]);
    expect(tree.textOf(tree.agreed())).toBe("Once there");
  });

  test("ghost returns the text of the best beam after the solid text", () => {
    const tree = treeOf(TREE, [6, 4]);
    expect(tree.ghost("Once")).toBe(" there was a");
    expect(tree.ghost("Once upon")).toBe("");
    expect(new BeamTree().ghost("Once")).toBe("");
  });

  test("find returns the node of a finished text although tokens split it differently", () => {
    const tree = treeOf("1 0 a\n2 0 ab\n3 1 b\n4 2 c\n5 3 c\n6 3 d", [4, 5, 6]);
    expect(pathTo(tree.find("abd")!).map((node) => node.id)).toEqual([1, 3, 6]);
    expect(tree.textOf(tree.find("abc")!)).toBe("abc");
    expect(tree.find("abx")).toBeNull();
    expect(tree.find("")).toBeNull();
  });

  test("grow ignores a repeated node and shows one whose parent is missing", () => {
    const tree = treeOf("1 0 a\n1 0 b\n9 7 c", [1, 9]);
    expect(tree.size).toBe(2);
    expect(tree.live.map((node) => tree.textOf(node))).toEqual(["a", "c"]);
  });

  test("scores are described in words", () => {
    expect(describeLikelihood(-1, -1)).toBe("as likely as the best");
    expect(describeLikelihood(-1.05, -1)).toBe("almost as likely as the best");
    expect(describeLikelihood(-1 - Math.log(2.5), -1)).toBe("2.5 times less likely than the best");
    expect(describeLikelihood(-1 - Math.log(40), -1)).toBe("40 times less likely than the best");
    expect(describeLikelihood(-20, -1)).toBe("over 1,000 times less likely than the best");
    const tree = treeOf("5 0 a\n9 5 b", [9]);
    expect(percentPerToken(tree.live[0]!)).toBe(Math.round(1000 * Math.exp(-0.45)) / 10);
  });
});

describe("drawBeams", () => {
  test("keeps the common part in the top lane, with dropped and open beams below it", () => {
    const tree = treeOf("1 0 Once\n2 1 _upon\n3 1 _I\n4 2 _a\n5 4 _time\n6 4 _day\n7 5 _x\n8 6 _y", [8, 7]);
    const { pieces, joins, ticks, lanes } = drawBeams(tree);
    expect(pieces.map(({ kind, lane, text }) => [kind, lane, text])).toEqual([
      ["agreed", 0, "Once upon a"],
      ["open", 0, " time x"],
      ["open", 1, " day y"],
      ["dropped", 1, " I"],
    ]);
    expect(pieces.filter(({ highlighted }) => highlighted).map(({ text }) => text)).toEqual(["Once upon a", " day y"]);
    expect(joins.map(({ from, to, kind }) => [from, to, kind])).toEqual([
      [0, 1, "open"],
      [0, 1, "dropped"],
    ]);
    expect([ticks.length, lanes]).toEqual([0, 2]);
  });

  test("orders beams that fork at one point by age, whichever is best", () => {
    const lines = "1 0 a\n2 0 b\n3 0 c\n4 2 x\n5 2 y\n6 2 z";
    for (const live of [
      [1, 3, 4, 5, 6],
      [6, 5, 4, 3, 1],
    ]) {
      const { pieces } = drawBeams(treeOf(lines, live));
      const lanes = [...pieces].sort((one, other) => one.lane - other.lane).map(({ text }) => text);
      expect(lanes.join(" ").replace("b x", "bx")).toBe("a bx y z c");
    }
  });

  test.each([
    [1, 4, 40],
    [2, 8, 60],
    [3, 6, 120],
    [4, 2, 30],
    [5, 8, 8],
  ])("draws every live beam without overlap: seed %i, width %i, %i tokens", (seed, width, steps) => {
    const tree = grown(seed, width, steps);
    const drawing = drawBeams(tree);
    expectNothingOverlaps(drawing);
    for (const end of tree.live) expect(drawnText(drawing, end)).toBe(singleLine(tree.textOf(end)));
    const open = new Set(drawing.pieces.filter(({ kind }) => kind !== "dropped").map(({ lane }) => lane));
    expect(open.size).toBe(tree.live.length);
    expect(drawing.pieces.filter(({ kind }) => kind === "agreed").every(({ lane }) => lane === 0)).toBe(true);
    expect(drawing.pieces.find(({ kind }) => kind === "agreed")?.text ?? "").toBe(tree.textOf(tree.agreed()));
  });

  test.each([
    [0, 200],
    [150, 400],
    [900, 1100],
    [0, 1e6],
    [5000, 6000],
  ])("clipDrawing from %i to %i keeps the visible pieces", (from, to) => {
    const whole = drawBeams(grown(3, 6, 60));
    const part = clipDrawing(whole, from, to);
    for (const piece of part.pieces) {
      const original = whole.pieces.find(({ key }) => key === piece.key)!;
      const at = Math.round((piece.x - original.x) / CELL_PX);
      expect(original.text.slice(at, at + piece.text.length)).toBe(piece.text);
      expect(piece.width).toBeCloseTo(piece.text.length * CELL_PX, 5);
      expect(piece.x).toBeLessThanOrEqual(Math.max(from, original.x));
      expect(piece.x + piece.width).toBeGreaterThanOrEqual(Math.min(to, original.x + original.width) - 0.01);
    }
    const seen = whole.pieces.filter(({ x, width }) => x + width > from && x < to);
    expect(part.pieces.map(({ key }) => key)).toEqual(seen.map(({ key }) => key));
    expect([part.width, part.lanes]).toEqual([whole.width, whole.lanes]);
  });

  test("countCells counts two cells for wide characters; singleLine and truncate keep characters whole", () => {
    expect(countCells("ab")).toBe(2);
    expect(countCells("日本")).toBe(4);
    expect(countCells("🦉")).toBe(2);
    expect(singleLine("a\nb\tc")).toBe("a⏎b⇥c");
    expect(truncate("abcdef", 4)).toBe("abc…");
    expect(truncate("🦉🦉", 2)).toBe("🦉🦉");
  });
});

/** Check that texts in a lane do not overlap and that connecting lines cross no text. */
function expectNothingOverlaps({ pieces, joins }: BeamDrawing): void {
  const boxes = pieces.map(({ lane, x, width }) => ({ lane, from: x, to: x + width }));
  for (const one of boxes) {
    for (const other of boxes) {
      if (one === other || one.lane !== other.lane) continue;
      expect(
        one.to <= other.from + 0.01 || other.to <= one.from + 0.01,
        `${JSON.stringify(one)} ${JSON.stringify(other)}`,
      ).toBe(true);
    }
  }
  for (const { x, from, to } of joins) {
    for (let lane = from + 1; lane < to; lane++) {
      const hit = boxes.find((box) => box.lane === lane && box.from < x + 12 && box.to > x + 0.01);
      expect(hit, `line at ${x} from ${from} to ${to}`).toBeUndefined();
    }
  }
}

/** Read the text of a beam back from the drawing, following the lines from its end. */
function drawnText({ pieces, joins, ends }: BeamDrawing, end: BeamNode): string {
  let { x, lane } = ends.get(end)!;
  let text = "";
  for (;;) {
    const piece = pieces.find(
      (other) =>
        other.kind !== "dropped" && other.lane === lane && other.x < x - 0.01 && other.x + other.width > x - 0.01,
    );
    if (piece) {
      const upTo = Math.round((x - piece.x) / CELL_PX);
      text = [...piece.text].slice(0, upTo).join("") + text;
      x = piece.x;
      continue;
    }
    const join = joins.find(
      (other) => other.kind !== "dropped" && other.to === lane && Math.abs(other.x + CURVE_PX - x) < 0.01,
    );
    if (!join) return text;
    [x, lane] = [join.x, join.from];
  }
}
