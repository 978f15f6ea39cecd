import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { WireConversation } from "../src/api/frames";
import { RequestError } from "../src/api/rest";
import { load, save } from "../src/app/browser";
import { DEFAULT_SAMPLING, parseSampling } from "../src/app/settings";
import { Conversations, groupByDay } from "../src/conversations/conversations";
import {
  copyLink,
  describeFailure,
  shareConversation,
  summarizeImport,
  toFileName,
} from "../src/conversations/importExport";
import { isPinned, MAX_SYSTEM_CHARS, readSettings, withPin, withSettings } from "../src/conversations/metadata";
import { splitAtMarks } from "../src/conversations/search";
import { type FakeServer, fakeNetwork } from "./fakes";

describe("groupByDay", () => {
  const at = (iso: string, metadata = {}): WireConversation => ({
    id: iso,
    title: iso,
    created_at: 0,
    updated_at: new Date(iso).getTime() / 1000,
    active_leaf: null,
    rev: 1,
    metadata,
  });
  const now = new Date("2026-03-15T09:00:00").getTime();

  it("uses calendar days in the user's time zone", () => {
    const list = [
      "2026-03-15T00:01:00",
      "2026-03-14T23:59:00",
      "2026-03-13T12:00:00",
      "2026-03-08T00:00:00",
      "2026-03-07T23:59:00",
      "2026-02-13T12:00:00",
      "2026-02-10T12:00:00",
      "2025-12-31T12:00:00",
    ];
    const named = groupByDay(
      list.map((iso) => at(iso)),
      now,
    ).map(({ name, conversations }) => [name, conversations.length]);
    expect(named).toEqual([
      ["Today", 1],
      ["Yesterday", 1],
      ["Last 7 days", 2],
      ["Last 30 days", 2],
      ["February", 1],
      ["December 2025", 1],
    ]);
  });

  it("lists pinned conversations first and only once", () => {
    const groups = groupByDay([at("2026-03-15T08:00:00"), at("2024-01-01T08:00:00", { pinned: "true" })], now);
    expect(groups.map(({ name }) => name)).toEqual(["Pinned", "Today"]);
    expect(groups.flatMap(({ conversations }) => conversations).length).toBe(2);
  });

  it("treats a time in the future as today", () => {
    expect(groupByDay([at("2026-03-16T08:00:00")], now)[0]!.name).toBe("Today");
  });
});

describe("a pinned conversation that is not on the first page of the list", () => {
  const head = (id: string, updated_at: number, metadata = {}) => ({
    ...{ id, title: id, created_at: 0, updated_at, active_leaf: null, rev: 1, metadata },
  });
  const OLD = "/v1/conversations/conv_old";
  const pinned = () => load<readonly string[]>("pinned", []);
  let server: FakeServer;
  let conversations: Conversations;

  beforeEach(() => {
    server = fakeNetwork();
    server.replies["/v1/conversations"] = { data: [head("conv_new", 9)], has_more: true, next: "x" };
    server.replies[OLD] = head("conv_old", 1, withPin({}, true));
    save("pinned", ["conv_old"]);
    conversations = new Conversations();
  });
  afterEach(() => {
    vi.unstubAllGlobals();
    vi.useRealTimers();
  });

  it("is listed after each reload", async () => {
    await conversations.refresh();
    expect(conversations.shown.value.map(({ id }) => id)).toEqual(["conv_new", "conv_old"]);
    expect(pinned()).toEqual(["conv_old"]);
  });

  it("stays pinned while it cannot be read", async () => {
    server.statuses[OLD] = 500;
    await conversations.refresh();
    expect(pinned()).toEqual(["conv_old"]);
  });

  it("is forgotten when it does not exist any more", async () => {
    server.statuses[OLD] = 404;
    await conversations.refresh();
    expect(pinned()).toEqual([]);
  });

  it("is forgotten when it is deleted or unpinned", async () => {
    await conversations.refresh();
    conversations.removeLocal("conv_old");
    expect(pinned()).toEqual([]);
    conversations.upsert(head("conv_old", 1, withPin({}, true)));
    expect(pinned()).toEqual(["conv_old"]);
    conversations.upsert(head("conv_old", 1));
    expect(pinned()).toEqual([]);
  });
});

describe("the link of a shared conversation", () => {
  const SHARED = { id: "conv_1", title: "One", created_at: 0, updated_at: 0, active_leaf: null, rev: 2 };
  const written: string[] = [];
  let server: FakeServer;
  let conversations: Conversations;

  beforeEach(async () => {
    server = fakeNetwork();
    written.length = 0;
    vi.stubGlobal("navigator", { clipboard: { writeText: (text: string) => Promise.resolve(written.push(text)) } });
    conversations = new Conversations();
    const conversation = { ...SHARED, metadata: { share: "msg_1 digest" } };
    server.replies["/v1/conversations/conv_1/share"] = { path: "/share/conv_1.secret", conversation };
    await shareConversation("conv_1", conversations);
  });
  afterEach(() => {
    vi.unstubAllGlobals();
    vi.useRealTimers();
  });
  const linkNow = () => conversations.linkOf(conversations.find("conv_1")!);

  it("can be copied again", async () => {
    expect(linkNow()).toBe("http://test/share/conv_1.secret");
    await copyLink("conv_1", linkNow()!, conversations);
    expect(written).toEqual(["http://test/share/conv_1.secret", "http://test/share/conv_1.secret"]);
  });

  it.each([[null], [{}], [{ share: "msg_1 other" }]])("is forgotten when the metadata is %j", (metadata) => {
    conversations.upsert({ ...SHARED, rev: 3, metadata });
    expect(linkNow()).toBeUndefined();
  });
});

describe("metadata", () => {
  it("round-trips a system prompt of any valid length and keeps other entries", () => {
    for (const length of [0, 1, 511, 512, 513, 1024, MAX_SYSTEM_CHARS]) {
      const system = [..."🎵é".repeat(length)].slice(0, length).join("");
      const metadata = withSettings({ other: "x", system_3: "old" }, { system, sampling: null });
      expect(readSettings(metadata).system).toBe(system);
      expect(metadata.other).toBe("x");
      expect(Object.values(metadata).every((value) => [...value].length <= 512)).toBe(true);
    }
  });

  it("drops a system prompt over the limit instead of truncating it", () => {
    expect(
      readSettings(withSettings({ system: "old" }, { system: "x".repeat(MAX_SYSTEM_CHARS + 1), sampling: null }))
        .system,
    ).toBe("");
  });

  it("round-trips the longest sampling settings over several values", () => {
    const sampling = {
      ...DEFAULT_SAMPLING,
      search: "beam" as const,
      temperature: 1.35,
      topK: 1000,
      minP: 0.35,
      presencePenalty: -1.35,
      frequencyPenalty: -1.35,
      repetitionPenalty: 1.35,
      maxTokens: 2 ** 31,
      seed: Number.MAX_SAFE_INTEGER,
      stop: '"\n'.repeat(80),
      schema: '"\n'.repeat(500),
      replyStart: '"\n'.repeat(80),
    };
    const metadata = withSettings({ sampling_2: "old" }, { system: "", sampling });
    expect(readSettings(metadata).sampling).toEqual(sampling);
    expect(Object.values(metadata).every((value) => value.length <= 512)).toBe(true);
    const fullest = withSettings(withPin(metadata, true), { system: "x".repeat(MAX_SYSTEM_CHARS), sampling });
    expect(Object.keys(fullest).length).toBeLessThanOrEqual(16); // the limit of the server
    expect(withSettings(metadata, { system: "", sampling: null })).toEqual({});
  });

  it("round-trips sampling and replaces invalid values by defaults", () => {
    const sampling = { ...DEFAULT_SAMPLING, n: 3, temperature: 0.35, seed: 7 };
    expect(readSettings(withSettings({}, { system: "", sampling })).sampling).toEqual(sampling);
    expect(readSettings({ sampling: "{" }).sampling).toBeNull();
    expect(parseSampling({ n: 900, temperature: -1, topP: "x", search: "no", seed: 1.5, maxTokens: NaN })).toEqual({
      ...DEFAULT_SAMPLING,
      n: 8,
      temperature: 0,
    });
  });

  it("round-trips the pinned flag", () => {
    expect(isPinned(withPin({ system: "x" }, true))).toBe(true);
    expect(withPin(withPin({ system: "x" }, true), false)).toEqual({ system: "x" });
    expect(isPinned(null)).toBe(false);
  });
});

describe("splitAtMarks", () => {
  it("splits by characters, not UTF-16 units", () => {
    const text = "🦓 Où est";
    expect(splitAtMarks(text, [[2, 4]])).toEqual([
      { text: "🦓 ", marked: false },
      { text: "Où", marked: true },
      { text: " est", marked: false },
    ]);
    expect(splitAtMarks(text, [])).toEqual([{ text, marked: false }]);
    expect(splitAtMarks(text, [[0, 8]])).toEqual([{ text, marked: true }]);
    expect(splitAtMarks("", [])).toEqual([]);
  });
});

describe("import and export", () => {
  it("toFileName returns names valid on every system", () => {
    expect(toFileName('a/b\\c: "d"? <e>|*')).toBe("a b c d e");
    expect(toFileName("..")).toBe("conversation");
    expect(toFileName("🎵".repeat(99))).toBe("🎵".repeat(60));
  });

  it("summarizeImport counts the results and quotes the first error", () => {
    const report = {
      created: 2,
      extended: 0,
      unchanged: 1,
      failed: 1,
      data: [{ status: "failed", error: { message: "Bad." } }],
    };
    expect(summarizeImport(report)).toBe("Conversations: 2 imported, 1 already here, 1 failed. Bad.");
    expect(summarizeImport({ created: 0, extended: 0, unchanged: 0, failed: 0, data: [] })).toContain("none");
  });

  it("describeFailure says in plain words that a file is no export, and quotes other errors", () => {
    const failure = (message: string, status: number) => describeFailure("a.txt", new RequestError(message, status));
    const plain = "a.txt was not imported: it is not a conversation export.";
    expect(failure("not valid JSON: 'H' at byte 0, where an object should begin", 400)).toBe(plain);
    expect(failure("not a conversation: it is neither of this server nor exported by ChatGPT", 400)).toBe(plain);
    expect(failure("items: at most 100, got 101", 400)).toBe("a.txt was not imported. items: at most 100, got 101");
    expect(failure("not valid JSON", 500)).toBe("a.txt was not imported. not valid JSON");
  });
});
