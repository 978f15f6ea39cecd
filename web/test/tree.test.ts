import { describe, expect, it } from "vitest";
import { Tree } from "../src/chat/tree";

function sample(): Tree {
  const tree = new Tree();
  tree.add({ key: "u1", parent: null, role: "user", id: "msg_u1" });
  tree.add({ key: "a1", parent: "u1", role: "assistant", turn: "t1" });
  tree.add({ key: "a2", parent: "u1", role: "assistant", turn: "t1" }, false);
  tree.add({ key: "a3", parent: "u1", role: "assistant", turn: "t2" }, false);
  tree.add({ key: "u2", parent: "a1", role: "user" });
  tree.add({ key: "u3", parent: "a2", role: "user" });
  return tree;
}
const keys = (tree: Tree) => tree.path.value.map((message) => message.key);

describe("Tree", () => {
  it("path follows the chosen children", () => {
    expect(keys(sample())).toEqual(["u1", "a1", "u2"]);
  });
  it("choose switches to the branch with its own leaf, and back", () => {
    const tree = sample();
    tree.choose(tree.get("a2")!);
    expect(keys(tree)).toEqual(["u1", "a2", "u3"]);
    tree.choose(tree.get("a1")!);
    expect(keys(tree)).toEqual(["u1", "a1", "u2"]);
  });
  it("reveal chooses all ancestors", () => {
    const tree = sample();
    tree.choose(tree.get("a3")!);
    tree.reveal(tree.get("u3")!);
    expect(keys(tree)).toEqual(["u1", "a2", "u3"]);
  });
  it("siblings returns all versions", () => {
    const tree = sample();
    const a1 = tree.get("a1")!;
    expect(tree.siblings(a1).map((message) => message.key)).toEqual(["a1", "a2", "a3"]);
  });
  it("several roots are versions of the first message", () => {
    const tree = sample();
    tree.add({ key: "u9", parent: null, role: "user" });
    expect(keys(tree)).toEqual(["u9"]);
    expect(tree.siblings(tree.get("u1")!).length).toBe(2);
  });
  it("byId finds a message by its server id", () => {
    expect(sample().byId("msg_u1")?.key).toBe("u1");
    expect(sample().byId("nobody")).toBeUndefined();
  });
});

describe("Tree.remove", () => {
  const build = () => {
    const tree = new Tree();
    const add = (key: string, parent: string | null, role: "user" | "assistant") =>
      tree.add({ key, parent, role, id: key, text: key });
    add("a", null, "user");
    add("b", "a", "assistant");
    add("b2", "a", "assistant");
    tree.choose(tree.get("b")!);
    add("c", "b", "user");
    add("d", "c", "assistant");
    return tree;
  };
  const keys = (messages: readonly { key: string }[]) => messages.map(({ key }) => key);

  it("attaches the children to the parent, and restore puts the message back", () => {
    const tree = build();
    const removed = tree.remove(tree.get("b")!);
    expect(keys(tree.path.value)).toEqual(["a", "c", "d"]);
    expect(keys(tree.childrenOf("a"))).toEqual(["c", "b2"]);
    expect(tree.get("c")?.parent).toBe("a");
    tree.restore(removed);
    expect(keys(tree.path.value)).toEqual(["a", "b", "c", "d"]);
    expect(keys(tree.childrenOf("a"))).toEqual(["b", "b2"]);
    expect(tree.get("c")?.parent).toBe("b");
  });

  it("shows a sibling of a removed leaf, and removes a root", () => {
    const tree = build();
    tree.choose(tree.get("b2")!);
    const removed = tree.remove(tree.get("b2")!);
    expect(keys(tree.path.value)).toEqual(["a", "b", "c", "d"]);
    tree.restore(removed);
    expect(keys(tree.path.value)).toEqual(["a", "b2"]);
    tree.remove(tree.get("a")!);
    expect(keys(tree.path.value)).toEqual(["b2"]);
    tree.remove(tree.get("b2")!);
    expect(keys(tree.path.value)).toEqual(["b", "c", "d"]);
  });

  it("does not count a failed answer without a text as a version, unless it is shown", () => {
    const tree = new Tree();
    tree.add({ key: "u", parent: null, role: "user" });
    const answer = (key: string, more: object) => tree.add({ key, parent: "u", role: "assistant", ...more });
    const [failed, cut, whole] = [
      answer("failed", { status: "error" }),
      answer("cut", { status: "error", text: "Some" }),
      answer("whole", { text: "All" }),
    ];
    expect(tree.versions(whole)).toEqual([cut, whole]);
    expect(tree.versions(failed)).toEqual([failed, cut, whole]);
  });
});
