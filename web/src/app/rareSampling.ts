// Rarely used sampling settings and their checks. The limits are those of the server.

export interface TokenBias {
  readonly id: number;
  readonly text: string; // for display
  readonly bias: number; // added to the logit of the token
}

export type EarlyStopping = "estimate" | "first" | "never";

export interface RareSampling {
  readonly minTokens: number;
  readonly reasoningTokens: number; // at most; 0: no limit
  readonly tokenBias: readonly TokenBias[];
  readonly badWords: string; // one per line
  readonly allowedTokens: string; // token ids; "": all
  readonly stopTokens: string; // token ids that end an answer
  readonly ignoreEos: boolean;
  readonly keepsStopText: boolean; // the text that ended an answer is a part of it
  readonly lengthPenalty: number; // of beams
  readonly earlyStopping: EarlyStopping; // of the beam search
  readonly beamGroups: number;
  readonly diversityPenalty: number;
}

export const DEFAULT_RARE: RareSampling = {
  minTokens: 0,
  reasoningTokens: 0,
  tokenBias: [],
  badWords: "",
  allowedTokens: "",
  stopTokens: "",
  ignoreEos: false,
  keepsStopText: false,
  lengthPenalty: 1,
  earlyStopping: "estimate",
  beamGroups: 1,
  diversityPenalty: 0,
};

export const MAX_TOKEN_ID = 2 ** 31 - 1;
export const MAX_BIAS = 100;
export const MAX_BIASED_TOKENS = 1024;
export const MAX_LENGTH_PENALTY = 10;
export const MAX_DIVERSITY_PENALTY = 100;
const MAX_BAD_WORDS = 64;
const MAX_BAD_WORD_CHARS = 256;
const MAX_STOP_TOKENS = 64;
const MAX_ALLOWED_TOKENS = 300_000;

/** A value that can be sent, or why the text is none. */
interface Checked<Value> {
  readonly value: Value;
  readonly error: string | null;
}

/** The texts that answers must not contain. */
export function checkBadWords({ badWords }: RareSampling): Checked<readonly string[]> {
  const words = [...new Set(badWords.split("\n").filter((line) => line.trim() !== ""))];
  const long = words.find((word) => [...word].length > MAX_BAD_WORD_CHARS);
  if (long !== undefined) return refuse(`“${long.slice(0, 20)}…” has more than ${MAX_BAD_WORD_CHARS} characters.`);
  if (words.length > MAX_BAD_WORDS) return refuse(`At most ${MAX_BAD_WORDS} texts, these are ${words.length}.`);
  return { value: words, error: null };
}

export const checkAllowedTokens = ({ allowedTokens }: RareSampling) => checkTokenIds(allowedTokens, MAX_ALLOWED_TOKENS);
export const checkStopTokens = ({ stopTokens }: RareSampling) => checkTokenIds(stopTokens, MAX_STOP_TOKENS);

function checkTokenIds(text: string, max: number): Checked<readonly number[]> {
  const words = text.split(/[\s,]+/).filter((word) => word !== "");
  const wrong = words.find((word) => !/^\d+$/.test(word) || Number(word) > MAX_TOKEN_ID);
  if (wrong !== undefined) {
    return refuse(`“${wrong.slice(0, 20)}” is not a token id, a whole number from 0 to ${MAX_TOKEN_ID}.`);
  }
  const ids = [...new Set(words.map(Number))];
  return ids.length > max ? refuse(`At most ${max} token ids, these are ${ids.length}.`) : { value: ids, error: null };
}

function refuse(error: string): Checked<readonly never[]> {
  return { value: [], error: `${error} None of them is used.` };
}

/** Why the number of groups or of tokens is not used with the other settings; null if it is. */
export function groupsError({ beamGroups }: RareSampling, beams: number): string | null {
  return beams % beamGroups === 0 ? null : `${beams} beams cannot form ${beamGroups} equal groups. It is not used.`;
}
export function minTokensError({ minTokens }: RareSampling, maxTokens: number): string | null {
  return maxTokens === 0 || minTokens <= maxTokens
    ? null
    : `More than the max output tokens (${maxTokens}). It is not used.`;
}

/** The bias of each token id, for the request. */
export function biasFields({ tokenBias }: RareSampling): Readonly<Record<string, number>> {
  return Object.fromEntries(tokenBias.map(({ id, bias }) => [id, bias]));
}

/** Set the bias of tokens, in place of an earlier one. */
export function withBias(biases: readonly TokenBias[], added: readonly TokenBias[]): readonly TokenBias[] {
  const ids = new Set(added.map(({ id }) => id));
  return [...biases.filter(({ id }) => !ids.has(id)), ...new Map(added.map((each) => [each.id, each])).values()];
}

const isObject = (value: unknown): value is Record<string, unknown> => typeof value === "object" && value !== null;
const isIn = (value: unknown, min: number, max: number): value is number =>
  typeof value === "number" && value >= min && value <= max;

/** Validate stored settings, which another client may have written; invalid values become the default. */
export function parseRare(value: unknown): RareSampling {
  const given: Record<string, unknown> = isObject(value) ? value : {};
  const number = (name: keyof RareSampling, min: number, max: number): number =>
    isIn(given[name], min, max) ? given[name] : (DEFAULT_RARE[name] as number);
  const text = (name: keyof RareSampling): string => (typeof given[name] === "string" ? given[name] : "");
  return {
    minTokens: Math.round(number("minTokens", 0, MAX_TOKEN_ID)),
    reasoningTokens: Math.round(number("reasoningTokens", 0, MAX_TOKEN_ID)),
    tokenBias: (Array.isArray(given.tokenBias) ? given.tokenBias : []).flatMap(parseBias).slice(0, MAX_BIASED_TOKENS),
    badWords: text("badWords"),
    allowedTokens: text("allowedTokens"),
    stopTokens: text("stopTokens"),
    ignoreEos: given.ignoreEos === true,
    keepsStopText: given.keepsStopText === true,
    lengthPenalty: number("lengthPenalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    earlyStopping:
      given.earlyStopping === "first" || given.earlyStopping === "never" ? given.earlyStopping : "estimate",
    beamGroups: Math.round(number("beamGroups", 1, 8)),
    diversityPenalty: number("diversityPenalty", 0, MAX_DIVERSITY_PENALTY),
  };
}

function parseBias(value: unknown): readonly TokenBias[] {
  if (!isObject(value) || !isIn(value.id, 0, MAX_TOKEN_ID) || !isIn(value.bias, -MAX_BIAS, MAX_BIAS)) return [];
  if (!Number.isInteger(value.id)) return [];
  return [{ id: value.id, bias: value.bias, text: typeof value.text === "string" ? value.text : "" }];
}

/** Leave out the rare settings that have their default, to store the others in little space. */
export function withoutDefaults<Settings extends RareSampling>(settings: Settings): Partial<Settings> {
  const isDefault = (name: string, value: unknown) =>
    name in DEFAULT_RARE && JSON.stringify(DEFAULT_RARE[name as keyof RareSampling]) === JSON.stringify(value);
  const kept = Object.entries(settings).filter(([name, value]) => !isDefault(name, value));
  return Object.fromEntries(kept) as Partial<Settings>;
}
