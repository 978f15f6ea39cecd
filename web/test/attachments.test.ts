import { afterEach, beforeEach, describe, expect, it, test, vi } from "vitest";
import { announcement } from "../src/app/notifications";
import { DEFAULT_SAMPLING, prefillWhileTyping, sampling, systemPrompt } from "../src/app/settings";
import {
  describeMessage,
  isFromCache,
  joinMessage,
  MAX_FILE_BYTES,
  MAX_FILES,
  splitMessage,
} from "../src/chat/attachments";
import { Chat } from "../src/chat/chat";
import { type FakeServer, FakeSocket, fakeNetwork } from "./fakes";

const NOTES = "File: notes.txt\n```\nBuy milk.\n```\n";
const GUIDE = "File: guide.md\n````\n```sh\nmake\n```\n````\n";

describe("a message with files", () => {
  test.each<[string, readonly string[], string]>([
    ["no file", [], "What next?"],
    ["one file", [NOTES], "What next?"],
    ["two files, one with a fence", [GUIDE, NOTES], "Compare\n```\nthem\n```"],
    ["only a file", [NOTES], ""],
    ["a file and an empty line", [NOTES], "\n\nindented"],
    ["a text that begins like a file", [NOTES], "File: x\n```\nnever closed"],
  ])("with %s is taken apart as it was joined", (_, blocks, text) => {
    const content = joinMessage(
      blocks.map((block) => ({ block })),
      text,
    );
    const parts = splitMessage(content);
    expect(parts.files.map(({ block }) => block)).toEqual(blocks);
    expect(parts.text).toBe(text);
  });

  it("has the name and the text of each file", () => {
    const { files } = splitMessage(`${GUIDE}\n${NOTES}\nCompare`);
    expect(files.map(({ name, text }) => [name, text])).toEqual([
      ["guide.md", "```sh\nmake\n```"],
      ["notes.txt", "Buy milk."],
    ]);
  });

  it("is described in one line without the text of the files", () => {
    expect(describeMessage(`${NOTES}\nWhat\nnext?`)).toBe("[notes.txt] What next?");
    expect(describeMessage("Plain")).toBe("Plain");
  });
});

describe("attaching", () => {
  let server: FakeServer;
  let chat: Chat;
  const list = () => chat.attachments.list.value;
  const explained = () => server.calls.filter(({ path }) => path === "/v1/cache/explain").map(({ body }) => body);

  beforeEach(() => {
    server = fakeNetwork();
    sampling.value = DEFAULT_SAMPLING;
    systemPrompt.value = "";
    prefillWhileTyping.value = true;
    server.replies["/v1/attachments"] = { filename: "notes.txt", num_pages: null, num_tokens: 100, text: NOTES };
    server.replies["/v1/cache/explain"] = { prompt_tokens: 110, cached_tokens: 0 };
    chat = new Chat("ws://test/v1/responses");
    chat.socket.connect();
    FakeSocket.last.open();
  });
  afterEach(() => {
    vi.unstubAllGlobals();
    vi.useRealTimers();
  });

  const notes = () => new File(["Buy milk."], "notes.txt");

  it("shows the size and the tokens, and looks the file up in the cache with its system prompt", async () => {
    systemPrompt.value = "Be brief.";
    await chat.attachments.add([notes()]);
    expect(list()).toMatchObject([{ name: "notes.txt", state: "ready", bytes: 9, tokens: 100, cachedTokens: 0 }]);
    expect(explained()).toEqual([{ instructions: "Be brief.", input: [{ role: "user", content: NOTES }] }]);
    expect(isFromCache(list()[0]!)).toBe(false);
    expect(announcement.value).toBe("Attached notes.txt, 9 bytes, 100 tokens.");
  });

  test.each([
    [110, true], // all
    [96, true], // all but the last page
    [60, false],
    [10, false], // what precedes the file
  ])(
    "with %i of 110 prompt tokens in the cache, of which 100 are the file's, from the cache: %s",
    async (cached, is) => {
      server.replies["/v1/cache/explain"] = { prompt_tokens: 110, cached_tokens: cached };
      await chat.attachments.add([notes()]);
      expect([list()[0]!.cachedTokens, isFromCache(list()[0]!)]).toEqual([cached - 10, is]);
    },
  );

  it("counts only the second of two files as cached or not", async () => {
    await chat.attachments.add([notes()]);
    server.replies["/v1/attachments"] = { filename: "guide.md", num_pages: null, num_tokens: 50, text: GUIDE };
    server.replies["/v1/cache/explain"] = { prompt_tokens: 160, cached_tokens: 110 };
    await chat.attachments.add([new File(["x"], "guide.md")]);
    expect(explained().at(-1)).toMatchObject({ input: [{ content: `${NOTES}\n${GUIDE}` }] });
    expect(list().map(({ cachedTokens }) => cachedTokens)).toEqual([0, 0]);
    expect(chat.attachments.tokens.value).toBe(150);
  });

  it("keeps a refused file with the server's reason, and does not send it", async () => {
    server.statuses["/v1/attachments"] = 400;
    server.replies["/v1/attachments"] = { error: { message: "photo.png is a binary file" } };
    await chat.attachments.add([new File(["\0"], "photo.png")]);
    expect(list()).toMatchObject([{ state: "failed", error: "photo.png is a binary file" }]);
    expect(chat.attachments.take()).toEqual([]);
    expect(list()).toEqual([]);
  });

  it("names a refused file of which the server's error does not say the name", async () => {
    server.statuses["/v1/attachments"] = 413;
    server.replies["/v1/attachments"] = { error: { message: "the body is larger than 9 bytes" } };
    await chat.attachments.add([notes()]);
    expect(list()[0]!.error).toBe("notes.txt: the body is larger than 9 bytes");
  });

  it("refuses a file over the limit without sending it", async () => {
    const large = new File(["x"], "large.bin");
    Object.defineProperty(large, "size", { value: MAX_FILE_BYTES + 1 });
    await chat.attachments.add([large]);
    expect(list()[0]!.error).toBe("large.bin is larger than the limit of 16 MiB");
    expect(server.calls.filter(({ path }) => path === "/v1/attachments")).toEqual([]);
  });

  it("takes a limited number of files", async () => {
    await chat.attachments.add(Array.from({ length: MAX_FILES + 1 }, notes));
    expect(list().length).toBe(MAX_FILES);
  });

  it("does not bring back a file that was removed while it was read", async () => {
    const done = chat.attachments.add([notes()]);
    expect(chat.attachments.isReading.value).toBe(true);
    chat.attachments.remove(list()[0]!);
    await done;
    expect(list()).toEqual([]);
  });

  it("does not look up a file that is longer than the model's context", async () => {
    chat.session.value = {
      model: "m",
      max_model_len: 100,
      limits: { max_frame_bytes: 1e6, max_n: 8, max_beam_width: 8 },
    };
    await chat.attachments.add([notes()]);
    expect(list()).toMatchObject([{ state: "ready", tokens: 100 }]);
    expect(explained()).toEqual([]);
  });

  it("shows the cost without the cache if the look-up fails", async () => {
    server.statuses["/v1/cache/explain"] = 503;
    await chat.attachments.add([notes()]);
    expect(list()).toMatchObject([{ state: "ready", tokens: 100, cachedTokens: 0 }]);
  });

  it("gives pasted texts names of their own", () => {
    chat.attachments.paste("long");
    chat.attachments.paste("longer");
    expect(list().map(({ name, pasted }) => [name, pasted])).toEqual([
      ["Pasted text.txt", "long"],
      ["Pasted text 2.txt", "longer"],
    ]);
  });

  it("puts the files before the text of the message, also of a queued one", async () => {
    await chat.attachments.add([notes()]);
    chat.send("What next?", {}, chat.attachments.take());
    const content = `${NOTES}\nWhat next?`;
    expect(FakeSocket.last.sent.at(-1)).toMatchObject({ type: "response.create", input: [{ role: "user", content }] });
    const user = chat.thread.value.tree.value.path.value[0]!;
    expect(user.text.value).toBe(content);
    expect(chat.attachments.sentWith(user)).toMatchObject([{ tokens: 100 }]);

    await chat.attachments.add([notes()]);
    chat.unsent.enqueue("And then?", chat.attachments.take());
    expect(list()).toEqual([]);
    chat.unsent.dequeue(chat.thread.value.queued.value[0]!);
    expect(chat.prefill.text.value).toBe("And then?");
    expect(list()).toMatchObject([{ name: "notes.txt", tokens: 100 }]);
  });

  it("prefills the files with the text that is being typed", async () => {
    await chat.attachments.add([notes()]);
    chat.prefill.text.value = "What";
    await vi.advanceTimersByTimeAsync(500);
    const content = `${NOTES}\nWhat`;
    expect(FakeSocket.last.sent.at(-1)).toMatchObject({ type: "prompt.prewarm", input: [{ role: "user", content }] });
  });

  it("keeps the files of each conversation, and those of the new one until it starts", async () => {
    await chat.attachments.add([notes()]);
    chat.newConversation();
    expect(list().length).toBe(1);
    server.replies["/v1/conversations/conv_2"] = { id: "conv_2", rev: 1, active_leaf: null, metadata: {} };
    server.replies["/v1/conversations/conv_2/items"] = { data: [] };
    await chat.open("conv_2");
    expect(list()).toEqual([]);
    chat.newConversation();
    expect(list().length).toBe(1);
    chat.send("Hi", {}, chat.attachments.take());
    chat.newConversation();
    expect(list()).toEqual([]);
  });
});
