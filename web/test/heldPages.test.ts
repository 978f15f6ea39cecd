// @vitest-environment jsdom
import { h, render } from "preact";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { systemPrompt } from "../src/app/settings";
import { settingsOf } from "../src/chat/answerSettings";
import { listBranches } from "../src/chat/branchList";
import { Chat } from "../src/chat/chat";
import { cellsOf, MAX_LOOKUPS, readHeldPages, withBranch } from "../src/chat/heldPages";
import { Thread } from "../src/chat/thread";
import { Tree } from "../src/chat/tree";
import { Turn } from "../src/chat/turn";
import { cellAt, outlinePath } from "../src/draw/pages";
import { ChatContext } from "../src/ui/context";
import { type Call, fakeNetwork } from "./fakes";

function branchesOf(count: number, tree = new Tree()) {
  tree.add({ key: "u", id: "msg_u", parent: null, role: "user", text: "Hi" });
  for (let index = 0; index < count; index++)
    tree.add({ key: `a${index}`, id: `msg_${index}`, parent: "u", role: "assistant", text: `Answer ${index}` });
  return listBranches(tree);
}

describe("page map geometry", () => {
  test("cellAt is the inverse of outlinePath for every cell, and null beside the cells", () => {
    const [count, columns] = [23, 5]; // the last row has three cells
    const rows = 5;
    for (let cell = 0; cell < count; cell++) {
      const [, x, y] = /^M(\d+) (\d+)h10v10h-10z$/.exec(outlinePath([cell], columns))!;
      for (const [dx, dy] of [
        [0.1, 0.1],
        [9.9, 9.9],
      ] as const) {
        const at = [(Number(x) + dx) / (columns * 10), (Number(y) + dy) / (rows * 10)] as const;
        expect(cellAt(...at, count, columns)).toBe(cell);
      }
    }
    expect(cellAt(0.7, 0.9, count, columns)).toBeNull();
    expect([cellAt(1, 0.5, count, columns), cellAt(-0.01, 0.5, count, columns)]).toEqual([null, null]);
    expect([cellAt(0.5, 1, count, columns), cellAt(0.5, -0.01, count, columns)]).toEqual([null, null]);
  });
});

describe("withBranch", () => {
  test("withBranch joins the branches of a page and keeps the longest text", () => {
    const [first, second] = branchesOf(2);
    let held = withBranch(new Map(), first!, [
      { map_index: 4, text: "Hi and" },
      { map_index: null, text: "on the host" },
      { map_index: null },
    ]);
    held = withBranch(held, second!, [
      { map_index: 4, text: "Hi" },
      { map_index: 9, text: "more" },
    ]);
    expect([...held]).toEqual([
      [4, { text: "Hi and", branches: [first, second] }],
      [9, { text: "more", branches: [second] }],
    ]);
  });

  test("cellsOf puts pages into the cells that stand for them", () => {
    const [branch] = branchesOf(1);
    const pages = [9, 4, 5, 0].map((map_index) => ({ map_index, text: String(map_index) }));
    const cells = cellsOf(withBranch(new Map(), branch!, pages), 4);
    expect([...cells].map(([cell, found]) => [cell, found.map(({ text }) => text)])).toEqual([
      [0, ["0"]],
      [1, ["4", "5"]],
      [2, ["9"]],
    ]);
  });
});

describe("readHeldPages", () => {
  test("readHeldPages looks up the newest stored branches with their texts, and leaves out one that is refused", async () => {
    const server = fakeNetwork();
    const thread = new Thread();
    branchesOf(MAX_LOOKUPS + 1, thread.tree.value);
    const init = { parent: "u", role: "assistant", turn: "turn" } as const;
    const running = thread.tree.value.add({ key: "run", id: "msg_run", ...init, status: "streaming" });
    thread.addTurn(new Turn("turn", [running]));
    server.statuses["/v1/cache/explain"] = 400;
    expect((await readHeldPages(thread, "Be kind.")).size).toBe(0);
    const bodies = server.calls.map(({ body }) => body as Record<string, unknown>);
    expect(bodies.map(({ previous_item_id }) => previous_item_id)).toEqual([
      ...Array.from({ length: MAX_LOOKUPS - 1 }, (_, index) => `msg_${index + 2}`),
      "msg_u", // the answer that is being written is not stored
    ]);
    expect(bodies.every(({ page_texts }) => page_texts === true)).toBe(true);
    expect(new Set(bodies.map(({ instructions }) => instructions))).toEqual(new Set(["Be kind."]));
  });

  test("readHeldPages looks up an answer with the system prompt that it was generated with", async () => {
    const server = fakeNetwork();
    const thread = new Thread();
    branchesOf(1, thread.tree.value);
    const init = { parent: "u", role: "assistant", turn: "turn" } as const;
    const turn = new Turn("turn", [thread.tree.value.add({ key: "brief", id: "msg_brief", ...init })]);
    thread.addTurn(turn);
    turn.phase.value = "ended";
    turn.settings.value = settingsOf({ id: "resp_1", status: "completed", instructions: "" });
    server.statuses["/v1/cache/explain"] = 400;
    await readHeldPages(thread, "Be kind.");
    expect(server.calls.map(({ body }) => (body as { instructions?: string }).instructions)).toEqual([
      "Be kind.",
      undefined,
    ]);
  });

  afterEach(() => {
    vi.unstubAllGlobals();
    vi.useRealTimers();
  });
});

describe("PageInspector", () => {
  let chat: Chat;
  let calls: Call[];
  let pages: { map_index: number | null; text?: string }[];
  const MAP = { page_size: 16, num_pages: 12, pages_per_cell: 1, cells: "fisifoaiffff" };
  const slider = () => document.querySelector<HTMLElement>("[role=slider]");
  const text = (selector: string) => [...document.querySelectorAll(selector)].map((found) => found.textContent);
  const show = async (map = MAP) => {
    const { PageInspector } = await import("../src/ui/panels/PageInspector");
    const props = { map, drawn: map.cells.length, columns: 4, children: null };
    render(h(ChatContext.Provider, { value: chat }, h(PageInspector, props)), document.body);
    await vi.advanceTimersByTimeAsync(100);
  };
  const press = async (key: string) => {
    slider()!.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    await vi.advanceTimersByTimeAsync(20);
    return text(".page-text")[0];
  };

  beforeEach(async () => {
    const server = fakeNetwork();
    vi.stubGlobal("matchMedia", () => ({ matches: false }));
    ({ calls } = server);
    pages = [
      { map_index: 1, text: "one" },
      { map_index: 2, text: "two" },
      { map_index: 7, text: "seven" },
      { map_index: 8, text: "freed meanwhile" },
    ];
    server.replies["/v1/cache/explain"] = { prompt_tokens: 64, cached_tokens: 60, messages: null, pages };
    systemPrompt.value = "";
    chat = new Chat("ws://test/v1/responses");
    chat.thread.value.id.value = "conv_1";
    branchesOf(2, chat.thread.value.tree.value);
  });
  afterEach(() => {
    render(null, document.body);
    vi.unstubAllGlobals();
    vi.useRealTimers();
  });

  test("PageInspector walks the pages of the conversation by arrow keys and names the branches that use them", async () => {
    await show();
    expect(slider()!.getAttribute("aria-valuemax")).toBe("3"); // not the free page
    expect(text(".page-text")).toEqual([]);
    slider()!.focus();
    await vi.advanceTimersByTimeAsync(20);
    expect(text(".page-text")).toEqual(["one"]);
    expect(text(".page-holders")[0]).toBe("Idle, used by 2 branches: Branch 1Branch 2");
    expect(await press("ArrowRight")).toBe("two");
    expect(slider()!.getAttribute("aria-valuetext")).toBe("Shared, used by 2 branches: two");
    expect(slider()!.getAttribute("aria-valuenow")).toBe("2");
    expect([await press("ArrowDown"), await press("ArrowDown")]).toEqual(["seven", "seven"]);
    expect([await press("Home"), await press("End"), await press("ArrowLeft")]).toEqual(["one", "seven", "two"]);
  });

  test("PageInspector shows the page under the pointer, and keeps it over pages that are not the conversation's", async () => {
    await show();
    const map = document.querySelector("svg")!;
    map.getBoundingClientRect = () => new DOMRect(100, 200, 40, 30);
    const point = async (cell: number) => {
      const [clientX, clientY] = [100 + (cell % 4) * 10 + 5, 200 + Math.floor(cell / 4) * 10 + 5];
      map.dispatchEvent(new MouseEvent("pointermove", { clientX, clientY, bubbles: true }));
      await vi.advanceTimersByTimeAsync(20);
      return text(".page-text")[0];
    };
    expect([await point(7), await point(2), await point(5), await point(8)]).toEqual(["seven", "two", "two", "two"]);
  });

  test("PageInspector forgets a chosen page that was freed, and reads the pages anew", async () => {
    await show();
    slider()!.focus();
    await press("End");
    for (const state of ["f", "o"]) {
      await show({ ...MAP, cells: `fisifoa${state}ffff` });
      expect(text(".page-text")).toEqual([]);
    }
    const before = calls.length;
    pages[0]!.text = "written anew";
    await vi.advanceTimersByTimeAsync(6000);
    expect(calls.length).toBeGreaterThan(before);
    expect(await press("Home")).toBe("written anew");
  });

  test("PageInspector looks the pages up once as long as the map does not change", async () => {
    await show();
    const before = calls.length;
    expect(before).toBeGreaterThan(0);
    await show({ ...MAP });
    await vi.advanceTimersByTimeAsync(60_000);
    expect(calls.length).toBe(before);
  });

  test("PageInspector is no control in a conversation without pages", async () => {
    pages.length = 0;
    await show();
    expect([slider(), text(".page-details"), document.querySelectorAll("svg *").length]).toEqual([null, [], 0]);
  });
});
