import { expect, it } from "vitest";
import { countTokens, listBranches, ownText, readMarks, withMark } from "../src/chat/branchList";
import { Tree } from "../src/chat/tree";

function forked(): Tree {
  const tree = new Tree();
  tree.add({ key: "u", parent: null, role: "user", text: "Hello" });
  tree.add({ key: "a", parent: "u", role: "assistant", text: "one" });
  tree.add({ key: "b", parent: "u", role: "assistant", text: "two" });
  tree.add({ key: "v", parent: "b", role: "user", text: "more" });
  return tree;
}

it("Branches end at leaves, and own what follows the last fork", () => {
  const branches = listBranches(forked());
  expect(branches.map(({ path }) => path.map(({ key }) => key).join(""))).toEqual(["ua", "ubv"]);
  expect(branches.map(ownText)).toEqual(["one", "two\n\nmore"]);
  const single = new Tree();
  single.add({ key: "u", parent: null, role: "user", text: "Hello" });
  expect(listBranches(single).map(ownText)).toEqual(["Hello"]);
});

it("Tokens before the own messages are shared, with those of a system prompt", () => {
  const branch = listBranches(forked())[1]!;
  const messages = [5, 10, 20, 40, 9].map((tokens) => ({ tokens, cached_tokens: Math.min(tokens, 20) }));
  const prompt = { prompt_tokens: 84, cached_tokens: 60, messages };
  expect(countTokens(branch, prompt)).toEqual({ shared: 15, total: 75, cold: 20 });
  expect(countTokens(branch, { ...prompt, messages: messages.slice(1) })).toEqual({ shared: 10, total: 70, cold: 20 });
  expect(countTokens(branch, { ...prompt, messages: null })).toBeNull();
});

it("Marks survive other metadata, and are left out when they are empty or too many", () => {
  let metadata = withMark({ pinned: "true" }, "msg_1", { name: "Dragons", starred: true })!;
  expect(metadata.pinned).toBe("true");
  expect(readMarks(metadata)).toEqual({ msg_1: { name: "Dragons", starred: true } });
  metadata = withMark(metadata, "msg_1", { name: "", starred: false })!;
  expect(metadata).toEqual({ pinned: "true" });
  expect(withMark({}, "msg_1", { name: "x".repeat(600), starred: false })).toBeNull();
  expect(readMarks({ branches: "[broken" })).toEqual({});
});
