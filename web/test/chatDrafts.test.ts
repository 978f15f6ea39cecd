import { beforeEach, describe, expect, it, vi } from "vitest";
import { systemPrompt } from "../src/app/settings";
import type { Attachment } from "../src/chat/attachments";
import { Chat } from "../src/chat/chat";
import { QUESTION_EDITOR } from "../src/chat/drafts";
import type { Message } from "../src/chat/tree";
import {
  beginReply,
  CREATED,
  chat,
  leaf,
  openChat,
  replies,
  reply,
  sent,
  statuses,
  storedDrafts,
  streamId,
  texts,
} from "./chatPage";
import { FakeSocket } from "./fakes";

openChat();

describe("Unsent texts of a chat", () => {
  it("stops a running answer and goes on with a message sent meanwhile", () => {
    chat.send("One");
    const stream_id = streamId();
    const push = (frame: object) => FakeSocket.last.push({ stream_id, ...frame });
    beginReply();
    chat.send("Two");
    expect(sent()).toEqual({ type: "response.cancel", response_id: "resp_1", reason: "steered" });
    push({ type: "response.output_item.done", output_index: 0, item: { id: "msg_a1", finish_reason: "cancelled" } });
    push({ type: "response.incomplete", response: { ...CREATED, status: "cancelled" } });
    expect(sent()).toMatchObject({ previous_item_id: "msg_a1", input: [{ role: "user", content: "Two" }] });
    const path = chat.thread.value.tree.value.path.value;
    expect(path.map(({ status }) => status.value)).toEqual(["done", "steered", "done", "waiting"]);
  });

  it("sends queued messages one by one, and none after a stop", () => {
    chat.send("One");
    chat.unsent.enqueue("Two");
    chat.unsent.enqueue("Three");
    expect(chat.thread.value.queued.value.map(({ text }) => text)).toEqual(["Two", "Three"]);
    reply(["answer"], "1");
    expect(sent()).toMatchObject({ input: [{ content: "Two" }] });
    chat.stop();
    reply(["cut"], "2", "cancelled");
    expect(chat.live.value).toBeNull();
    expect(chat.thread.value.queued.value.map(({ text }) => text)).toEqual(["Three"]);
    chat.unsent.sendFirst();
    expect(sent()).toMatchObject({ input: [{ content: "Three" }] });
    chat.unsent.enqueue("Four");
    chat.unsent.dequeue(chat.thread.value.queued.value[0]!);
    expect(chat.prefill.text.value).toBe("Four");
    reply(["answer"], "3");
    expect(chat.live.value).toBeNull();
  });

  it("keeps queued messages across a reload, in the message box and in order", async () => {
    chat.send("One");
    for (const text of ["Two", "Three"]) chat.unsent.enqueue(text);
    reply(["answer"], "1");
    expect(sent()).toMatchObject({ input: [{ content: "Two" }] });
    chat.unsent.enqueue("Four");
    chat.prefill.text.value = "Five";
    expect(await storedDrafts()).toEqual({ conv_1: "Three\n\nFour\n\nFive" });
    chat.newConversation(); // the queue of a hidden conversation goes on
    reply(["answer"], "2");
    expect(sent()).toMatchObject({ input: [{ content: "Three" }] });
    expect(await storedDrafts()).toEqual({ conv_1: "Four\n\nFive" });
    await chat.open("conv_1");
    expect(chat.prefill.text.value).toBe("Five");
    const reloaded = new Chat("ws://test/v1/responses");
    await reloaded.open("conv_1");
    expect([reloaded.prefill.text.value, reloaded.thread.value.queued.value]).toEqual(["Four\n\nFive", []]);
  });

  it("keeps the text of an editor across a reload, if its message is stored", async () => {
    chat.send("One");
    reply(["answer"]);
    const [question, answer] = chat.thread.value.tree.value.path.value as [Message, Message];
    chat.unsent.drafts.keepEdit(question, QUESTION_EDITOR, "Two");
    const unstored = chat.thread.value.tree.value.add({ key: "u", parent: answer.key, role: "user" });
    chat.unsent.drafts.keepEdit(unstored, QUESTION_EDITOR, "Three");
    await vi.advanceTimersByTimeAsync(1000);
    const reloaded = new Chat("ws://test/v1/responses").unsent.drafts;
    expect([question, unstored].map((each) => reloaded.editOf(each, QUESTION_EDITOR))).toEqual(["Two", undefined]);
    chat.unsent.drafts.keepEdit(question, QUESTION_EDITOR, null);
    expect(chat.unsent.drafts.editOf(question, QUESTION_EDITOR)).toBeUndefined();
  });

  it("sends the queue only when the server is ready", async () => {
    chat.send("One");
    chat.unsent.enqueue("Two");
    statuses["/readyz"] = 503;
    replies["/readyz"] = { status: "loading" };
    void chat.readiness.pollUntilReady();
    reply(["answer"]);
    await vi.advanceTimersByTimeAsync(5000);
    expect(sent()).toMatchObject({ input: [{ content: "One" }] });
    expect(chat.thread.value.queued.value).toHaveLength(1);
    statuses["/readyz"] = 200;
    await vi.advanceTimersByTimeAsync(1000);
    expect(sent()).toMatchObject({ input: [{ content: "Two" }] });
  });

  describe("a message that is longer than the context", () => {
    const refuse = () => {
      const error = { code: "context_length_exceeded", message: "Too many tokens" };
      FakeSocket.last.push({ type: "error", stream_id: streamId(), status: 400, error });
    };

    it("returns to the empty message box, and stays there across a reload", async () => {
      chat.send("One");
      reply(["answer"]);
      chat.send("Long");
      refuse();
      expect(texts()).toEqual(["One", "answer"]);
      expect(chat.prefill.text.value).toBe("Long");
      expect(chat.thread.value.refusal.value).toBe("Too many tokens. Your message is in the message box again.");
      await vi.advanceTimersByTimeAsync(1000);
      const reloaded = new Chat("ws://test/v1/responses");
      await reloaded.open("conv_1");
      expect(reloaded.prefill.text.value).toBe("Long");
      chat.send("Short");
      expect(sent()).toMatchObject({ previous_item_id: "msg_a10", input: [{ content: "Short" }] });
      expect(chat.thread.value.refusal.value).toBe("");
    });

    it("stays in the thread while another text is in the message box", () => {
      chat.send("Long");
      chat.prefill.text.value = "Next";
      refuse();
      expect([texts(), chat.prefill.text.value]).toEqual([["Long", ""], "Next"]);
    });

    it("stays in the thread as a version of the edited message", () => {
      chat.send("One");
      reply(["answer"]);
      chat.edit(chat.thread.value.tree.value.path.value[0]!, "Long");
      refuse();
      expect([texts(), chat.prefill.text.value]).toEqual([["Long", ""], ""]);
    });

    describe("and a version of another one", () => {
      let question: Message;
      const newest = () => chat.thread.value.tree.value.path.value[0]!;
      const draftAfterReload = async () => {
        await vi.advanceTimersByTimeAsync(1000);
        return new Chat("ws://test/v1/responses").unsent.drafts.editOf(question, QUESTION_EDITOR);
      };

      beforeEach(() => {
        chat.send("One");
        reply(["answer"]);
        question = newest();
        chat.edit(question, "Long");
        refuse();
      });

      it("is in the editor of that message after a reload", async () => {
        expect(await draftAfterReload()).toBe("Long");
      });

      it("is replaced as a draft by the next refused one", async () => {
        chat.edit(newest(), "Longer");
        refuse();
        expect(await draftAfterReload()).toBe("Longer");
      });

      it("is no draft once another version is stored", async () => {
        chat.edit(newest(), "Short");
        reply(["answer"], "2");
        chat.unsent.drafts.saveSoon();
        expect(await draftAfterReload()).toBeUndefined();
      });

      it("is no draft once it is deleted", async () => {
        chat.edits.remove(newest());
        chat.unsent.drafts.saveSoon();
        expect(await draftAfterReload()).toBeUndefined();
      });
    });

    it("returns to its hidden conversation", async () => {
      chat.send("One");
      reply(["answer"]);
      chat.send("Long");
      const stream = sent();
      await chat.open("conv_7");
      FakeSocket.last.sent.push(stream);
      refuse();
      expect(chat.prefill.text.value).toBe("");
      await chat.open("conv_1");
      expect(chat.prefill.text.value).toBe("Long");
    });
  });

  describe("a message that failed and is not stored", () => {
    const fail = () => {
      const error = { code: "rate_limit_exceeded", message: "Too many requests" };
      FakeSocket.last.push({ type: "error", stream_id: streamId(), status: 429, error });
    };

    it("returns to the message box of the next new chat, before what is written there", async () => {
      const file = { name: "notes.txt", state: "ready", block: "File: notes.txt\n```\nBuy milk.\n```\n" } as Attachment;
      chat.send("One", {}, [file]);
      fail();
      chat.send("Two");
      fail();
      chat.prefill.text.value = "Three";
      await chat.open("conv_7");
      expect(chat.prefill.text.value).toBe("");
      chat.newConversation();
      expect([texts(), chat.prefill.text.value]).toEqual([[], "One\n\nTwo\n\nThree"]);
      expect(chat.thread.value.attachments.value).toEqual([file]);
      expect(await storedDrafts()).toEqual({ "": "One\n\nTwo\n\nThree" });
    });

    it("stays in its thread while that is shown, and is in the message box after a reload", async () => {
      chat.send("One");
      fail();
      expect([texts(), chat.prefill.text.value]).toEqual([["One", ""], ""]);
      expect(await storedDrafts()).toEqual({ "": "One" });
      expect(new Chat("ws://test/v1/responses").prefill.text.value).toBe("One");
    });

    it("is in the message box of its conversation after a reload, until a retry has stored it", async () => {
      chat.send("One");
      reply(["answer"]);
      chat.send("Two");
      fail();
      expect(await storedDrafts()).toEqual({ conv_1: "Two" });
      chat.regenerate(leaf());
      reply(["answer"], "2");
      expect(await storedDrafts()).toEqual({});
    });

    it("is not taken from a new chat whose answer is generated", () => {
      chat.send("One");
      chat.newConversation();
      expect([texts(), chat.prefill.text.value]).toEqual([[], ""]);
    });
  });

  it("sends a queued message with the settings of the moment when it was written", () => {
    chat.send("One");
    systemPrompt.value = "Be brief.";
    chat.unsent.enqueue("Two");
    systemPrompt.value = "";
    reply(["answer"]);
    expect(sent()).toMatchObject({ instructions: "Be brief." });
  });

  it("keeps an unsent text for each conversation, and across a reload", async () => {
    chat.prefill.text.value = "for a new one";
    await chat.open("conv_7");
    expect(chat.prefill.text.value).toBe("");
    chat.prefill.text.value = "for seven";
    chat.newConversation();
    expect(chat.prefill.text.value).toBe("for a new one");
    await vi.advanceTimersByTimeAsync(1000);
    const reloaded = new Chat("ws://test/v1/responses");
    expect(reloaded.prefill.text.value).toBe("for a new one");
    await reloaded.open("conv_7");
    expect(reloaded.prefill.text.value).toBe("for seven");
  });

  describe("of two tabs", () => {
    it("each keeps the unsent texts of the other", async () => {
      const other = new Chat("ws://test/v1/responses");
      await chat.open("conv_7");
      chat.prefill.text.value = "for seven";
      expect(await storedDrafts()).toEqual({ conv_7: "for seven" });
      other.prefill.text.value = "for a new one";
      expect(await storedDrafts()).toEqual({ conv_7: "for seven", "": "for a new one" });
    });

    it("one does not bring back what was sent in the other", async () => {
      await chat.open("conv_7");
      chat.prefill.text.value = "for seven";
      await storedDrafts();
      const other = new Chat("ws://test/v1/responses");
      chat.prefill.text.value = "";
      expect(await storedDrafts()).toEqual({});
      other.prefill.text.value = "for a new one";
      expect(await storedDrafts()).toEqual({ "": "for a new one" });
    });
  });

  it("keeps the text written during the first answer when the conversation gets its id", () => {
    chat.send("One");
    chat.prefill.text.value = "Two";
    reply(["answer"]);
    expect(chat.prefill.text.value).toBe("Two");
    chat.newConversation();
    expect(chat.prefill.text.value).toBe("");
  });
});
