import { describe, expect, test } from "vitest";
import { readPrefix } from "../src/chat/jsonPrefix";
import { schemaChecker } from "../src/chat/schemaCheck";

const PERSON = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 8 },
    age: { type: "integer", minimum: 0 },
    tags: { type: "array", items: { enum: ["a", "b"] }, minItems: 1, maxItems: 2 },
    home: { anyOf: [{ type: "null" }, { $ref: "#/$defs/home" }] },
  },
  required: ["name", "age"],
  additionalProperties: false,
  $defs: { home: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } },
};
const check = schemaChecker(PERSON);
const growing = (text: string) => check(text, false).state;

describe("readPrefix", () => {
  const texts = [
    ' {"a" : [1, -2.5e+3, "x\\n\\u00e9\\"", true, false, null, {}, []], "__proto__": {"": 0.5}} ',
    '[[["deep"]], "\\\\"]',
    '"text"',
    " null ",
  ];
  test.each(texts)("readPrefix reads every prefix of %s", (text) => {
    expect(JSON.stringify(readPrefix(text).value)).toBe(JSON.stringify(JSON.parse(text)));
    expect(readPrefix(text).open).toEqual([]);
    for (let end = 0; end < text.trimEnd().length; end++)
      expect(readPrefix(text.slice(0, end)).open.length).toBeGreaterThan(0);
  });

  test("readPrefix returns the known values and the open paths", () => {
    const { value, open } = readPrefix('{"a": [1, {"b": "te');
    expect(value).toEqual({ a: [1, { b: "te" }] });
    expect(open).toEqual([[], ["a"], ["a", "1"], ["a", "1", "b"]]);
    expect(readPrefix('{"a": 1, "b": 2').value).toEqual({ a: 1 });
    expect(readPrefix("[tru").value).toEqual([]);
  });

  const wrong = [
    "x",
    "{a",
    "[1,]",
    "[01",
    "{,",
    '{"a" 1',
    '"\\x',
    '"a\nb',
    "[1}",
    "nul!",
    "1.x",
    "{}x",
    '"\\u12g',
    "--",
  ];
  test.each(wrong)("readPrefix refuses %s as JSON", (text) => expect(() => readPrefix(text)).toThrow(SyntaxError));
});

describe("schemaChecker", () => {
  test("a matching answer is incomplete until its last character", () => {
    const text = '{"name": "Ada", "age": 36, "tags": ["a", "b"], "home": {"city": "London"}}';
    for (let end = 0; end < text.length; end++)
      expect(growing(text.slice(0, end)), text.slice(0, end)).toBe("incomplete");
    expect(check(text, false)).toEqual({ state: "matches", problem: "" });
    expect(check(text, true)).toEqual({ state: "matches", problem: "" });
  });

  test.each([
    ["Hello", "This is not JSON: character 1 is not expected in JSON."],
    ["[", 'At the top level: the type "array" is invalid. Expected "object".'],
    ['{"age": "o', 'At /age: the type "string" is invalid. Expected "integer".'],
    ['{"age": -1,', "At /age: -1 is less than 0."],
    ['{"name": "Ada Lovelace', "At /name: String is too long (12 > 8)."],
    ['{"tags": ["c"', 'At /tags/0: the value does not match any of ["a","b"].'],
    ['{"tags": []', "At /tags: Array has too few items (0 < 1)."],
    ['{"tags": ["a", "a", "b"', "At /tags: Array has too many items (3 > 2)."],
    ['{"size": {', "At /size: the schema allows no value here."],
    ['{"home": 3,', "At /home: the value does not match any subschemas."],
  ])("a growing answer %s is invalid as soon as no more text can match", (text, problem) => {
    expect(check(text, false)).toEqual({ state: "invalid", problem });
  });

  test.each([
    ['{"name": "Ada"', "The JSON ends before it is complete."],
    ["", "The JSON ends before it is complete."],
    ["{]", "This is not JSON: character 2 is not expected in JSON."],
    ['{"name": "Ada"}', 'At the top level: the value does not have required property "age".'],
    ['{"name": "Ada", "age": 1.5}', 'At /age: the type "number" is invalid. Expected "integer".'],
    ['{"name": "Ada", "age": 1, "x": 2}', "At /x: the schema allows no value here."],
  ])("an answer that ended as %s does not match", (text, problem) => {
    expect(check(text, true)).toEqual({ state: "invalid", problem });
  });

  test("an open value is not refused for what more text may add", () => {
    for (const text of ['{"tags": [', '{"age": 1.', '{"home": {"ci', '{"home": {}', "  "]) {
      expect(growing(text), text).toBe(text === '{"home": {}' ? "invalid" : "incomplete");
    }
    const either = schemaChecker({ oneOf: [{ type: "array" }, { type: "object", required: ["a", "b"] }] });
    expect(either('{"a": 1', false).state).toBe("incomplete");
    const forked = schemaChecker({ if: { required: ["a"] }, else: { type: "array" } });
    expect(forked('{"x": 1', false).state).toBe("incomplete");
  });

  test("a schema that the validator cannot use is unknown", () => {
    const missing = schemaChecker({ $ref: "#/$defs/none" });
    expect(missing("1", true)).toEqual({ state: "unknown", problem: 'Unresolved $ref "#/$defs/none".' });
    expect(schemaChecker({ pattern: "(" })('"a"', true).state).toBe("unknown");
  });
});
