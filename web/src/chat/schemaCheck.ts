// Checks whether an answer matches its JSON schema, also while it is written. Loaded when an answer has a schema.

import { encodePointer, type OutputUnit, type Schema, Validator } from "@cfworker/json-schema";
import type { JsonObject } from "../api/frames";
import { readPrefix } from "./jsonPrefix";

/** `incomplete`: more text may match. `unknown`: the schema cannot be checked here. */
type SchemaState = "incomplete" | "matches" | "invalid" | "unknown";

export interface SchemaVerdict {
  readonly state: SchemaState;
  readonly problem: string; // for the user; "": none
}

const MATCHES: SchemaVerdict = { state: "matches", problem: "" };
const INCOMPLETE: SchemaVerdict = { state: "incomplete", problem: "" };
const DRAFT = "2020-12";

// Limits that a value which grows cannot return to.
const FINAL_WHILE_OPEN = new Set(["type", "maxLength", "maxItems", "maxProperties"]);
// Schemas below these keywords do not have to match, or apply to other values once there is more text.
const CONDITIONS = /\/(?:anyOf|oneOf|not|if|then|else|contains|unevaluated(?:Properties|Items))\//;
// Their errors are those of a value inside, which follow.
const OUTER_KEYWORDS = new Set([
  "$ref",
  "allOf",
  "properties",
  "patternProperties",
  "additionalProperties",
  "unevaluatedProperties",
  "prefixItems",
  "items",
  "additionalItems",
  "unevaluatedItems",
]);
const NOTHING: Schema = { type: [] as never };
const CLOSABLE = new Set(["additionalProperties", "items", "additionalItems"]);

/** Return a function that checks a text that has ended, or that may grow. */
export function schemaChecker(schema: JsonObject): (text: string, ended: boolean) => SchemaVerdict {
  try {
    const checker = new SchemaChecker(schema);
    return (text, ended) => checker.check(text, ended);
  } catch (error) {
    return () => unknown(error);
  }
}

class SchemaChecker {
  private readonly whole: Validator;
  private readonly growing: Validator;

  constructor(schema: JsonObject) {
    this.whole = new Validator(structuredClone(schema) as Schema, DRAFT, false);
    // the validator does not say which keyword has a schema that is false
    const close = (key: string, value: unknown) => (value === false && CLOSABLE.has(key) ? NOTHING : value);
    this.growing = new Validator(JSON.parse(JSON.stringify(schema), close) as Schema, DRAFT, false);
  }

  check(text: string, ended: boolean): SchemaVerdict {
    try {
      return this.checkWhole(text) ?? (ended ? describeEnd(text) : this.checkPrefix(text));
    } catch (error) {
      return unknown(error);
    }
  }

  /** Null if the text is not JSON, or not yet. */
  private checkWhole(text: string): SchemaVerdict | null {
    let value: unknown;
    try {
      value = JSON.parse(text);
    } catch {
      return null;
    }
    const { valid, errors } = this.whole.validate(value);
    return valid ? MATCHES : describe(errors.find(({ keyword }) => !OUTER_KEYWORDS.has(keyword)) ?? errors[0]!);
  }

  private checkPrefix(text: string): SchemaVerdict {
    const prefix = tryRead(text);
    if (prefix instanceof SyntaxError) return { state: "invalid", problem: `This is not JSON: ${prefix.message}.` };
    if (prefix.value === undefined) return INCOMPLETE;
    const open = new Set(prefix.open.map((path) => ["#", ...path.map(encodePointer)].join("/")));
    const final = this.growing
      .validate(prefix.value)
      .errors.find(
        ({ keyword, keywordLocation, instanceLocation }) =>
          !OUTER_KEYWORDS.has(keyword) &&
          !CONDITIONS.test(keywordLocation) &&
          (!open.has(instanceLocation) || FINAL_WHILE_OPEN.has(keyword)),
      );
    return final ? describe(final) : INCOMPLETE;
  }
}

function tryRead(text: string): ReturnType<typeof readPrefix> | SyntaxError {
  try {
    return readPrefix(text);
  } catch (error) {
    if (error instanceof SyntaxError) return error;
    throw error;
  }
}

/** Say why a text that has ended is not JSON. */
function describeEnd(text: string): SchemaVerdict {
  const prefix = tryRead(text);
  const problem =
    prefix instanceof SyntaxError ? `This is not JSON: ${prefix.message}.` : "The JSON ends before it is complete.";
  return { state: "invalid", problem };
}

function describe({ keyword, instanceLocation, error }: OutputUnit): SchemaVerdict {
  const path = decodeURIComponent(instanceLocation.slice(1));
  const isForbidden = keyword === "false" || error.endsWith('Expected "".');
  const what = isForbidden ? "the schema allows no value here." : (REWORDED[keyword] ?? error);
  const problem = what.replace("Instance type", "the type").replace(/^Instance/, "the value");
  return { state: "invalid", problem: `At ${path || "the top level"}: ${problem}` };
}

const REWORDED: Readonly<Record<string, string>> = { maxProperties: "the value has too many properties." };

function unknown(error: unknown): SchemaVerdict {
  return { state: "unknown", problem: (error as Error).message.split(/\n| {2}/)[0]! };
}

const LABELS: Readonly<Record<SchemaVerdict["state"], string>> = {
  incomplete: "JSON incomplete, matches the schema so far",
  matches: "Matches the schema",
  invalid: "Does not match the schema.",
  unknown: "The schema cannot be checked.",
};

export function describeVerdict({ state, problem }: SchemaVerdict): string {
  return `${LABELS[state]} ${problem}`.trim();
}
