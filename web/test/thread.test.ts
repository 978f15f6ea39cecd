import { describe, expect, it } from "vitest";
import type { StoredItem } from "../src/api/frames";
import { itemsOf, StaleCheck, Thread } from "../src/chat/thread";

describe("StaleCheck", () => {
  it("detects changes made elsewhere, in whatever order own changes are recorded", () => {
    const check = new StaleCheck();
    check.markRead(3);
    expect(check.isStale(3)).toBe(false);
    expect(check.isStale(4)).toBe(true);
    check.markSeen(5); // own change, but revision 4 is not
    expect(check.isStale(5)).toBe(true);
    check.markSeen(4);
    expect(check.isStale(5)).toBe(false);
    check.markRead(9);
    check.markSeen(7);
    expect(check.isStale(9)).toBe(false);
    expect(check.isStale(10)).toBe(true);
  });

  it("agrees with a list of seen check", () => {
    let seed = 7;
    const random = (below: number) => {
      seed = (seed * 48271) % 2147483647;
      return seed % below;
    };
    for (let round = 0; round < 200; round++) {
      const check = new StaleCheck();
      const seen = new Set<number>();
      for (let step = 0; step < 20; step++) {
        const rev = 1 + random(12);
        if (random(5) === 0) {
          check.markRead(rev);
          for (let below = 1; below <= rev; below++) seen.add(below);
        } else {
          check.markSeen(rev);
          seen.add(rev);
        }
        for (let head = 1; head <= 13; head++) {
          const news = Array.from({ length: head }, (_, at) => at + 1).some((below) => !seen.has(below));
          expect(check.isStale(head)).toBe(news);
        }
      }
    }
  });
});

describe("Thread.load", () => {
  const head = { id: "conv_1", title: null, created_at: 1, updated_at: 1, active_leaf: "msg_2", rev: 2 };
  const item = (id: string, role: string, more: Partial<StoredItem> = {}): StoredItem => ({
    id,
    role,
    status: "completed",
    content: [{ type: "text", text: id }],
    parent_id: null,
    response_id: null,
    index: 0,
    num_tokens: 3,
    finish_reason: null,
    created_at: 1,
    ...more,
  });
  const answer = (more: Partial<StoredItem>) =>
    item("msg_2", "assistant", { parent_id: "msg_1", response_id: "resp_1", ...more });
  const loaded = (more: Partial<StoredItem>) => {
    const thread = new Thread();
    thread.load([item("msg_1", "user"), answer(more)], head);
    return thread;
  };

  it.each([
    ["interrupted", "interrupted"],
    ["steered", "steered"],
    ["constraint_dead_end", "stopped"],
  ])("labels a stored answer by the reason %s of its response", (reason, status) => {
    const thread = loaded({ status: "incomplete", finish_reason: "cancelled", incomplete_details: { reason } });
    expect(thread.tree.value.leaf.value?.status.value).toBe(status);
  });

  it("labels a stored answer without a reason as stopped", () => {
    const thread = loaded({ status: "incomplete", finish_reason: "cancelled" });
    expect(thread.tree.value.leaf.value?.status.value).toBe("stopped");
  });

  it("gives calls to their answer, and their outputs to the answer of each branch", () => {
    const call = { call_id: "call_1", name: "look", arguments: "{}", candidate: 0 };
    const output = (id: string, parent: string, call_id = "call_1") =>
      item(id, "tool", { parent_id: parent, call_id, content: [{ type: "text", text: `of ${id}` }] });
    const items = [
      item("msg_1", "user"),
      answer({ calls: [call] }),
      output("out_1", "msg_2"),
      output("out_2", "msg_2"),
      output("out_3", "out_2", "call_2"),
      item("msg_3", "assistant", { parent_id: "out_1" }),
      item("msg_4", "assistant", { parent_id: "out_3" }),
      item("msg_5", "user", { parent_id: "msg_4" }),
    ];
    const thread = new Thread();
    thread.load(items.slice(0, 2), head);
    const tree = thread.tree.value;
    const [, shown] = tree.path.value;
    thread.load(items, head);
    for (const message of tree.all()) {
      [message.calls.value, message.callOutputs.value] = [[], []]; // as if the page had shown them without
    }
    thread.load(items, head);
    expect(shown!.calls.value).toEqual([call]);
    expect(tree.byId("msg_1")!.calls.value).toEqual([]);
    expect(tree.childrenOf(shown!.key).map(({ id, callOutputs }) => [id.value, callOutputs.value])).toEqual([
      ["msg_3", [{ callId: "call_1", text: "of out_1" }]],
      [
        "msg_4",
        [
          { callId: "call_1", text: "of out_2" },
          { callId: "call_2", text: "of out_3" },
        ],
      ],
    ]);
    expect(tree.byId("msg_5")!.callOutputs.value).toEqual([]);
  });

  it("keeps the calls of an answer that is still written", () => {
    const thread = loaded({ status: "in_progress" });
    const call = { call_id: "call_1", name: "look", arguments: "{}", candidate: 0 };
    const shown = thread.tree.value.leaf.value!;
    shown.calls.value = [call];
    thread.load([item("msg_1", "user"), answer({ status: "in_progress" })], head);
    expect(shown.calls.value).toEqual([call]);
  });

  it("restores the figures of a stored answer", () => {
    const miss = { reason: "evicted", at_token: 16, detail: "" };
    const receipt = { tokens_after_stop: 1, pages_freed: 2, stop_latency_ms: 3 };
    const usage = { input_tokens: 40, output_tokens: 101, input_tokens_details: { cached_tokens: 32 } };
    const statistics = { first_token_ms: 12.5, decode_ms: 1000, copied_pages: 1, miss, fork_at: 7, receipt };
    const thread = loaded({ usage, statistics });
    const turn = thread.turnOf(thread.tree.value.leaf.value!)!;
    expect([turn.firstTokenMs.value, turn.tokensPerSecond.value, turn.copiedPages.value]).toEqual([12.5, 100, 1]);
    expect([turn.miss.value, turn.receipt.value, turn.start?.keepTokens]).toEqual([miss, receipt, 7]);
  });

  it.each([
    ["not stored", null, null],
    ["stored without an answer", "msg_u1", "msg_u1"],
  ])("keeps a failed turn above the next message if its message is %s", (_, id, above) => {
    const thread = new Thread();
    const tree = thread.tree.value;
    tree.add({ key: "u1", parent: null, role: "user", id, text: "Too long" });
    tree.add({ key: "a1", parent: "u1", role: "assistant", turn: "turn-1", status: "error" });
    tree.add({ key: "u2", parent: "a1", role: "user", id: "msg_1" });
    tree.add({ key: "a2", parent: "u2", role: "assistant", turn: "turn-2", id: "msg_2" });
    const stored = [item("msg_1", "user", { parent_id: above }), item("msg_2", "assistant", { parent_id: "msg_1" })];
    const items = id === null ? stored : [item(id, "user"), ...stored];
    for (const round of [1, 2]) {
      thread.load(items, { ...head, rev: round });
      expect(tree.path.value.map(({ key }) => key)).toEqual(["u1", "a1", "u2", "a2"]);
      for (const message of tree.path.value) expect(tree.versions(message)).toEqual([message]);
    }
    expect(itemsOf(thread, []).find((each) => each.id === "msg_1")!.parent_id).toBe(above);
  });
});
