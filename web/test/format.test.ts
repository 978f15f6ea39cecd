import { expect, test } from "vitest";
import { commonPrefix } from "../src/app/format";

test("commonPrefix returns the common beginning up to a whole word", () => {
  expect(commonPrefix(["Once upon a time", "Once upon a hill"])).toBe("Once upon a ");
  expect(commonPrefix(["Once upon", "Once under"])).toBe("Once ");
  expect(commonPrefix(["Once", "Once more"])).toBe("Once");
  expect(commonPrefix(["One", "Two"])).toBe("");
  expect(commonPrefix(["same", "same"])).toBe("same");
  expect(commonPrefix([])).toBe("");
});
