import { expect, test } from "vitest";
import { commonPrefix, formatDuration, formatShare } from "../src/app/format";

test("commonPrefix returns the common beginning up to a whole word", () => {
  expect(commonPrefix(["Once upon a time", "Once upon a hill"])).toBe("Once upon a ");
  expect(commonPrefix(["Once upon", "Once under"])).toBe("Once ");
  expect(commonPrefix(["Once", "Once more"])).toBe("Once");
  expect(commonPrefix(["One", "Two"])).toBe("");
  expect(commonPrefix(["same", "same"])).toBe("same");
  expect(commonPrefix([])).toBe("");
});

test("formatShare is a whole percent, or a dash of nothing", () => {
  expect([formatShare(1, 3), formatShare(0, 5), formatShare(0, 0)]).toEqual(["33 %", "0 %", "–"]);
});

test("formatDuration has the two largest units", () => {
  expect([59, 3599, 3600, 86_399, 86_400, 190_000].map(formatDuration)).toEqual([
    "0 min",
    "59 min",
    "1 h 0 min",
    "23 h 59 min",
    "1 day 0 h",
    "2 days 4 h",
  ]);
});
