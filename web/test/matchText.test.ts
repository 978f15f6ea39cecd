import { describe, expect, test } from "vitest";
import { filterMatches, LETTERS, matchText, NO_MATCH, PART, WORD_START } from "../src/app/matchText";

describe("matchText", () => {
  test.each<[string, string, number]>([
    ["", "New chat", WORD_START],
    ["  ", "New chat", WORD_START],
    ["ch", "New chat", WORD_START],
    ["chat new", "New chat", WORD_START],
    ["hat", "New chat", PART],
    ["new hat", "New chat", PART],
    ["nwct", "New chat", LETTERS],
    ["stngs", "Settings", LETTERS],
    ["tngs", "Settings", NO_MATCH],
    ["chats", "New chat", NO_MATCH],
    ["new robot", "New chat", NO_MATCH],
    ["CAFE", "Le Café", WORD_START],
    ["mark", "bookmark, markdown", WORD_START],
    ["über", "Uber die Brucke", WORD_START],
    [".*", "New chat", NO_MATCH],
  ])("%j in %j", (query, text, expected) => expect(matchText(query, text)).toBe(expected));
});

test("filterMatches lists the best matches first and keeps the order of equal ones", () => {
  const found = filterMatches("at", ["Chat", "Attach", "Other", "That", "At last"], (text) => text);
  expect(found.map(({ item }) => item)).toEqual(["Attach", "At last", "Chat", "That"]);
});
