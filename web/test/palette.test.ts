import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { toast, toasts } from "../src/app/notifications";
import { Chat } from "../src/chat/chat";
import { fakeNetwork } from "./fakes";

let chat: Chat;

beforeEach(() => {
  fakeNetwork();
  vi.stubGlobal("matchMedia", () => ({ matches: false }));
  chat = new Chat("ws://test/v1/responses");
});
afterEach(() => vi.unstubAllGlobals());

async function found(query: string): Promise<Record<string, readonly string[]>> {
  const { findOptions } = await import("../src/ui/Palette");
  return Object.fromEntries(findOptions(chat, query).map(({ name, options }) => [name, options.map((o) => o.label)]));
}

function store(id: string, title: string, metadata = {}): void {
  chat.conversations.upsert({
    id,
    object: "conversation",
    created_at: 1,
    updated_at: 1,
    rev: 1,
    title,
    active_leaf: null,
    metadata,
  } as Parameters<typeof chat.conversations.upsert>[0]);
}

test("a command has one name, and one key runs one command", async () => {
  const { COMMANDS } = await import("../src/ui/commands");
  expect(new Set(COMMANDS.map(({ label }) => label)).size).toBe(COMMANDS.length);
  for (const { label, keys, run, matches, keysOnly } of COMMANDS) {
    expect(keys !== undefined || (run !== undefined && !keysOnly), `${label} is listed somewhere`).toBe(true);
    expect(matches === undefined || (keys !== undefined && run !== undefined), `${label} names its key`).toBe(true);
  }
});

test("without a query, the commands that apply are listed, and no search", async () => {
  const { Commands, ...others } = await found("");
  expect(Commands).toContain("New chat");
  expect(others).toEqual({});
  for (const label of [
    "Stop the answer",
    "Regenerate the last answer",
    "Find in this conversation, on all branches",
    "Share a link to this branch",
    "Delete this conversation (with undo)",
    "Administration",
    "Sign out",
    "System theme", // chosen already
  ])
    expect(Commands, label).not.toContain(label);
});

test("commands of a shown conversation are listed", async () => {
  store("conv_1", "About owls", { pinned: "true", share: "abc" });
  chat.thread.value.id.value = "conv_1";
  const { Commands } = await found("");
  for (const label of ["Share a link to this branch", "Stop sharing this conversation", "Unpin this conversation"])
    expect(Commands).toContain(label);
  expect(Commands).not.toContain("Pin this conversation");
});

test("commands of the signed-in user are listed", async () => {
  chat.auth.identity.value = { key_id: "key_1", tenant: "a", user: "b", is_admin: true };
  expect((await found("admin")).Commands).toEqual(["Administration"]);
  expect((await found("sign")).Commands).toEqual(["Sign out"]);
});

test("titles match, and messages can be searched", async () => {
  store("conv_1", "About owls");
  store("conv_2", "");
  expect(await found("OWL")).toEqual({ Conversations: ["About owls"], Messages: ["Search messages for “OWL”"] });
  expect((await found("untit")).Conversations).toEqual(["Untitled"]);
});

test("scattered letters match only where no word does", async () => {
  expect((await found("stngs")).Commands).toEqual(["Settings"]);
  store("conv_1", "stngs");
  expect(await found("stngs")).toMatchObject({ Conversations: ["stngs"] });
  expect((await found("stngs")).Commands).toBeUndefined();
});

test("a page that is locked offers no search and no import", async () => {
  chat.conversations.state.value = "locked";
  expect(await found("import")).toEqual({});
});

describe("keys", () => {
  const press = (key: string, more: Partial<KeyboardEvent> = {}) =>
    ({ key, code: `Key${key.toUpperCase()}`, target: null, ...more }) as KeyboardEvent;

  test("Escape in a dialog leaves the panel below and the running answer to the next one", async () => {
    const { commandOf } = await import("../src/ui/commands");
    const { panel } = await import("../src/ui/navigation");
    const modal: { shown: object | null } = { shown: null };
    vi.stubGlobal("document", { querySelector: (selector: string) => selector === "dialog[open]" && modal.shown });
    panel.value = "pages";
    expect(commandOf(chat, press("Escape"))?.label).toBe("Close a panel");
    modal.shown = {};
    expect(commandOf(chat, press("Escape"))).toBeUndefined();
    panel.value = null;
  });

  test("Ctrl+Z outside of text undoes the last deletion while its toast is shown", async () => {
    class Field {}
    vi.stubGlobal("HTMLInputElement", Field);
    vi.stubGlobal("HTMLTextAreaElement", Field);
    const { commandOf } = await import("../src/ui/commands");
    const undo = press("z", { ctrlKey: true });
    expect(commandOf(chat, undo)).toBeUndefined();
    const [first, last] = [vi.fn(), vi.fn()];
    toast("“One” deleted.", { label: "Undo", run: first });
    toast("“Two” deleted.", { label: "Undo", run: last });
    toast("Link copied.", { label: "Stop sharing", run: vi.fn() });
    const inText = press("z", { ctrlKey: true, target: new Field() as unknown as EventTarget });
    expect(commandOf(chat, inText)).toBeUndefined();
    commandOf(chat, undo)!.run!(chat, undo);
    expect([first.mock.calls.length, last.mock.calls.length]).toEqual([0, 1]);
    expect(toasts.value.map(({ text }) => text)).toEqual(["“One” deleted.", "Link copied."]);
    toasts.value = [];
  });
});

test("the page of the documentation names keys of commands only", async () => {
  const { COMMANDS } = await import("../src/ui/commands");
  const keys = new Set(COMMANDS.flatMap(({ keys }) => keys ?? []));
  const { default: text } = await import("../../chatcache/gateway/docs/chat-page.md?raw");
  const named = [...text.matchAll(/`((?:Ctrl|Alt)\+[^`]+)`/g)].map((match) =>
    match[1]!.replace(/^Alt\+\d$/, "Alt+1 … 8"),
  );
  expect(named.length).toBeGreaterThan(10);
  expect(named.filter((each) => !keys.has(each))).toEqual([]);
});
