import { signal } from "@preact/signals";
import { describe, expect, it } from "vitest";
import type { Message } from "../src/chat/tree";
import { findHits } from "../src/ui/thread/findHits";

const message = (text: string) => ({ key: text, text: signal(text) }) as unknown as Message;

describe("findHits", () => {
  it("finds every occurrence in every message, in order, without regard to case", () => {
    const messages = [message("Fox and fox"), message("none"), message("a FOX")];
    const hits = findHits(messages, " fox ");
    expect(hits.map(({ message, offset }) => [message.key, offset])).toEqual([
      ["Fox and fox", 0],
      ["Fox and fox", 8],
      ["a FOX", 2],
    ]);
  });

  it("finds nothing for an empty text, and no overlapping hits", () => {
    expect(findHits([message("a")], "  ")).toEqual([]);
    expect(findHits([message("aaaa")], "aa")).toHaveLength(2);
  });
});
