import { describe, expect, test } from "vitest";
import {
  checkAllowedTokens,
  checkBadWords,
  checkStopTokens,
  DEFAULT_RARE,
  groupsError,
  minTokensError,
  parseRare,
  type RareSampling,
  withBias,
  withoutDefaults,
} from "../src/app/rareSampling";
import { DEFAULT_SAMPLING, parseSampling, type Sampling, sameSampling } from "../src/app/settings";
import { requestFields } from "../src/chat/request";
import { isTooLongToStore, readSettings, withSettings } from "../src/conversations/metadata";

const rare = (change: Partial<RareSampling>): RareSampling => ({ ...DEFAULT_RARE, ...change });
const fields = (change: Partial<Sampling>) => requestFields({ ...DEFAULT_SAMPLING, ...change });
const ids = (count: number) => Array.from({ length: count }, (_, id) => id).join(" ");

describe("checks", () => {
  test("words are the lines with text, each once", () => {
    const badWords = "cat\n\n dog\n \ncat";
    expect(checkBadWords(rare({ badWords }))).toEqual({ value: ["cat", " dog"], error: null });
  });

  test.each<[string, string, string]>([
    ["too many", Array.from({ length: 65 }, (_, at) => `w${at}`).join("\n"), "At most 64 texts, these are 65."],
    ["too long", "x".repeat(257), "has more than 256 characters."],
  ])("%s words are named and not sent", (_, badWords, message) => {
    expect(checkBadWords(rare({ badWords })).error).toContain(message);
    expect(fields({ badWords })).not.toHaveProperty("bad_words");
  });

  test("the limit counts characters", () => {
    expect(checkBadWords(rare({ badWords: "🎵".repeat(256) })).error).toBeNull();
  });

  test("token ids are separated by spaces and commas", () => {
    expect(checkAllowedTokens(rare({ allowedTokens: " 5, 7\n9 5 " }))).toEqual({ value: [5, 7, 9], error: null });
  });

  test.each(["x", "1.5", "-1", "2147483648", "5;6"])("%j is no token id", (text) => {
    for (const check of [
      checkAllowedTokens(rare({ allowedTokens: text })),
      checkStopTokens(rare({ stopTokens: text })),
    ])
      expect(check.error).toContain(`“${text}” is not a token id`);
    expect(fields({ allowedTokens: text, stopTokens: text })).toEqual(fields({}));
  });

  test("at most 64 tokens end an answer", () => {
    expect(checkStopTokens(rare({ stopTokens: ids(64) })).error).toBeNull();
    expect(checkStopTokens(rare({ stopTokens: ids(65) })).error).toContain("At most 64 token ids, these are 65.");
  });

  test("groups divide the beams, and the least tokens are at most the most", () => {
    expect([groupsError(rare({ beamGroups: 2 }), 4), groupsError(rare({ beamGroups: 3 }), 4)]).toEqual([
      null,
      "4 beams cannot form 3 equal groups. It is not used.",
    ]);
    expect([minTokensError(rare({ minTokens: 9 }), 0), minTokensError(rare({ minTokens: 9 }), 9)]).toEqual([
      null,
      null,
    ]);
    expect(minTokensError(rare({ minTokens: 10 }), 9)).toContain("More than the max output tokens (9).");
  });
});

describe("requests", () => {
  test("without rare settings have no rare field", () => {
    expect(Object.keys(fields({}))).toEqual(["temperature", "top_p"]);
    expect(Object.keys(fields({ search: "beam", n: 2 })).sort()).toEqual(["beam_width", "n", "stream_beams"]);
  });

  test("have the fields of the API", () => {
    const settings = {
      tokenBias: [{ id: 7, text: "x", bias: -5 }],
      badWords: "cat",
      allowedTokens: "7 8",
      stopTokens: "9",
      minTokens: 3,
      reasoningTokens: 40,
      ignoreEos: true,
      keepsStopText: true,
    };
    const expected = {
      logit_bias: { "7": -5 },
      bad_words: ["cat"],
      allowed_token_ids: [7, 8],
      stop_token_ids: [9],
      min_tokens: 3,
      thinking_token_budget: 40,
      ignore_eos: true,
      include_stop_str_in_output: true,
    };
    expect(fields(settings)).toMatchObject(expected);
    expect(fields({ ...settings, search: "beam" })).toMatchObject(expected);
    expect(fields({ ...settings, maxTokens: 2 })).not.toHaveProperty("min_tokens");
  });

  test("of a beam search have its details, and of sampling have not", () => {
    const settings = {
      n: 4,
      beamGroups: 2,
      diversityPenalty: 1.5,
      lengthPenalty: 0.5,
      earlyStopping: "first" as const,
    };
    expect(fields({ ...settings, search: "beam" })).toEqual({
      n: 4,
      beam_width: 4,
      stream_beams: true,
      num_beam_groups: 2,
      diversity_penalty: 1.5,
      length_penalty: 0.5,
      early_stopping: true,
    });
    expect(fields({ ...settings, search: "beam", earlyStopping: "never" }).early_stopping).toBe("never");
    expect(fields({ ...settings, search: "beam", beamGroups: 1 })).not.toHaveProperty("diversity_penalty");
    expect(fields({ ...settings, search: "beam", beamGroups: 3 })).not.toHaveProperty("num_beam_groups");
    expect(Object.keys(fields(settings)).sort()).toEqual(["n", "temperature", "top_p"]);
  });
});

test("a new bias replaces the one of the same token", () => {
  const one = { id: 1, text: "a", bias: 1 };
  const two = { id: 2, text: "b", bias: 2 };
  expect(
    withBias(
      [one, two],
      [
        { ...one, bias: 9 },
        { ...one, bias: 9 },
      ],
    ),
  ).toEqual([two, { ...one, bias: 9 }]);
});

describe("stored settings", () => {
  const settings: Sampling = {
    ...DEFAULT_SAMPLING,
    tokenBias: [{ id: 7, text: " x", bias: -5 }],
    badWords: "cat\ndog",
    earlyStopping: "never",
    lengthPenalty: -2,
    ignoreEos: true,
  };

  test("are read back", () => {
    expect(readSettings(withSettings({}, { system: "", sampling: settings })).sampling).toEqual(settings);
    expect(sameSampling(settings, { ...settings, tokenBias: [{ id: 7, text: " x", bias: -5 }] })).toBe(true);
    expect(sameSampling(settings, { ...settings, tokenBias: [{ id: 7, text: " x", bias: 5 }] })).toBe(false);
  });

  test("name a rare setting only if it is set", () => {
    expect(Object.keys(withoutDefaults(DEFAULT_SAMPLING))).not.toContain("badWords");
    expect(Object.keys(withoutDefaults(DEFAULT_SAMPLING))).toContain("temperature");
    expect(withoutDefaults(settings).badWords).toBe("cat\ndog");
  });

  test("that are too long are known to be", () => {
    expect(isTooLongToStore(settings)).toBe(false);
    const long = { ...settings, badWords: "x".repeat(3100) };
    expect(isTooLongToStore(long)).toBe(true);
    expect(readSettings(withSettings({}, { system: "", sampling: long })).sampling).toBeNull();
  });

  test("of another client are checked", () => {
    const wrong = [{ id: -1, bias: 1 }, { id: 1.5, bias: 1 }, { id: 1, bias: 101 }, { id: 1 }, null, 7];
    expect(
      parseRare({ tokenBias: wrong, badWords: 5, earlyStopping: "soon", lengthPenalty: 11, beamGroups: 9 }),
    ).toEqual(DEFAULT_RARE);
    expect(parseRare({ tokenBias: [{ id: 1, bias: 2 }] }).tokenBias).toEqual([{ id: 1, bias: 2, text: "" }]);
    expect(parseSampling(settings)).toEqual(settings);
    for (const value of [null, 5, "x", []]) expect(parseRare(value)).toEqual(DEFAULT_RARE);
  });
});
