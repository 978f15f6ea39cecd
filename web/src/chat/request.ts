// Fields of a request: where in the message tree it continues, and its sampling parameters.
import type { Continuation, CreateFrame, ToolFields } from "../api/frames";
import {
  biasFields,
  checkAllowedTokens,
  checkBadWords,
  checkStopTokens,
  groupsError,
  minTokensError,
} from "../app/rareSampling";
import { DEFAULT_SAMPLING, MAX_STOPS, parseSchema, type Sampling, stopTexts } from "../app/settings";
import type { Thread } from "./thread";
import type { CallOutput, Message } from "./tree";
import type { ForkStart } from "./turn";

/** How an answer begins, and what its request has instead of the conversation's settings. */
export interface AnswerOptions {
  readonly start?: ForkStart | null; // with tokens of another answer
  readonly text?: string; // with a text
  readonly instructions?: string;
  readonly reasoning?: CreateFrame["reasoning"] | undefined;
  readonly outputs?: readonly CallOutput[]; // of the calls of the answer that it continues
}

/** Request for an answer to the message `above`: the user's, or with `outputs` an answer that called functions. */
export function createFrame(
  thread: Thread,
  above: Message,
  stream: string,
  settings: Sampling,
  { start = null, text = "", instructions = "", reasoning, outputs }: AnswerOptions,
  tools: ToolFields = {},
): CreateFrame {
  const begin = text || settings.replyStart;
  return {
    type: "response.create",
    stream_id: stream,
    // not `randomUUID`, which is missing over plain http from another host
    idempotency_key: crypto.getRandomValues(new Uint32Array(4)).join(),
    ...(start
      ? continuationAtToken(start)
      : outputs
        ? continuationWithOutputs(above, outputs)
        : begin
          ? continuationFromText(thread, above, begin)
          : continuationOf(thread, above)),
    // a forked answer keeps its own instructions and tools
    ...(instructions && !start ? { instructions } : {}),
    ...(start ? {} : tools),
    explain: true,
    ...(reasoning ? { reasoning } : {}),
    ...requestFields(settings),
  };
}

export function continuationOf(thread: Thread, user: Message): Continuation {
  const stored = user.id.value;
  if (stored !== null) return { input: [], previous_item_id: stored };
  return { input: [{ role: "user", content: user.text.value }], ...continuationAfter(thread, user.parent) };
}

/** Continue after an answer with the outputs of its calls. */
function continuationWithOutputs(answer: Message, outputs: readonly CallOutput[]): Continuation {
  const input = outputs.map(({ callId, text }) => ({
    type: "function_call_output" as const,
    call_id: callId,
    output: text,
  }));
  return { input, previous_item_id: answer.id.value! };
}

/** Let the answer to `user` begin with a text. */
function continuationFromText(thread: Thread, user: Message, text: string): Continuation {
  const continuation = continuationOf(thread, user);
  const input = [...continuation.input, { role: "assistant" as const, content: text }];
  return { ...continuation, input, continue_final_message: true };
}

/** Continue inside an answer: the new answer shares its first tokens. */
function continuationAtToken(start: ForkStart): Continuation {
  const continuation = { input: [], previous_item_id: start.item, fork_at: start.keepTokens };
  return start.token ? { ...continuation, fork_with: start.token.id } : continuation;
}

/** Continue after the message `parent`; null is the root. */
export function continuationAfter(thread: Thread, parent: string | null): Omit<Continuation, "input"> {
  const conversation = thread.id.value;
  const after = thread.tree.value.nearestStored(parent);
  if (after !== null) return { previous_item_id: after };
  return conversation === null ? {} : { conversation, previous_item_id: "root" };
}

type Fields = Pick<
  CreateFrame,
  | "n"
  | "beam_width"
  | "stream_beams"
  | "temperature"
  | "top_p"
  | "top_k"
  | "min_p"
  | "presence_penalty"
  | "frequency_penalty"
  | "repetition_penalty"
  | "stop"
  | "min_tokens"
  | "thinking_token_budget"
  | "logit_bias"
  | "bad_words"
  | "allowed_token_ids"
  | "stop_token_ids"
  | "ignore_eos"
  | "include_stop_str_in_output"
  | "length_penalty"
  | "early_stopping"
  | "num_beam_groups"
  | "diversity_penalty"
  | "text"
  | "max_output_tokens"
  | "seed"
>;

/** Penalties, stop texts and the schema where they differ from the defaults, in the words of the API. */
function changedFields(settings: Sampling): Fields {
  const { presencePenalty, frequencyPenalty, repetitionPenalty } = settings;
  const stop = stopTexts(settings).slice(0, MAX_STOPS);
  const schema = parseSchema(settings).value;
  return {
    ...(presencePenalty !== DEFAULT_SAMPLING.presencePenalty ? { presence_penalty: presencePenalty } : {}),
    ...(frequencyPenalty !== DEFAULT_SAMPLING.frequencyPenalty ? { frequency_penalty: frequencyPenalty } : {}),
    ...(repetitionPenalty !== DEFAULT_SAMPLING.repetitionPenalty ? { repetition_penalty: repetitionPenalty } : {}),
    ...(stop.length > 0 ? { stop } : {}),
    ...(schema !== null ? { text: { format: { type: "json_schema", name: "answer", schema } } } : {}),
  };
}

/** Rare settings that differ from the defaults. One that the page has named as an error is left out. */
function rareFields(settings: Sampling): Fields {
  const { minTokens } = settings;
  const badWords = checkBadWords(settings).value;
  const allowed = checkAllowedTokens(settings).value;
  const stops = checkStopTokens(settings).value;
  return {
    ...(minTokens > 0 && minTokensError(settings, settings.maxTokens) === null ? { min_tokens: minTokens } : {}),
    ...(settings.reasoningTokens > 0 ? { thinking_token_budget: settings.reasoningTokens } : {}),
    ...(settings.tokenBias.length > 0 ? { logit_bias: biasFields(settings) } : {}),
    ...(badWords.length > 0 ? { bad_words: badWords } : {}),
    ...(allowed.length > 0 ? { allowed_token_ids: allowed } : {}),
    ...(stops.length > 0 ? { stop_token_ids: stops } : {}),
    ...(settings.ignoreEos ? { ignore_eos: true } : {}),
    ...(settings.keepsStopText ? { include_stop_str_in_output: true } : {}),
  };
}

function beamFields(settings: Sampling): Fields {
  const width = Math.max(2, settings.n);
  const { lengthPenalty, earlyStopping, beamGroups, diversityPenalty } = settings;
  const groups = groupsError(settings, width) === null ? beamGroups : 1;
  return {
    beam_width: width,
    stream_beams: true,
    ...(lengthPenalty !== DEFAULT_SAMPLING.lengthPenalty ? { length_penalty: lengthPenalty } : {}),
    ...(earlyStopping !== DEFAULT_SAMPLING.earlyStopping
      ? { early_stopping: earlyStopping === "first" || "never" }
      : {}),
    ...(groups > 1 ? { num_beam_groups: groups } : {}),
    ...(groups > 1 && diversityPenalty > 0 ? { diversity_penalty: diversityPenalty } : {}),
  };
}

export function requestFields(settings: Sampling): Fields {
  const common: Fields = {
    ...(settings.n > 1 ? { n: settings.n } : {}),
    ...(settings.maxTokens > 0 ? { max_output_tokens: settings.maxTokens } : {}),
    ...changedFields(settings),
    ...rareFields(settings),
  };
  if (settings.search === "beam") return { ...common, ...beamFields(settings) };
  return {
    ...common,
    temperature: settings.temperature,
    top_p: settings.topP,
    ...(settings.topK > 0 ? { top_k: settings.topK } : {}),
    ...(settings.minP > 0 ? { min_p: settings.minP } : {}),
    ...(settings.seed !== null ? { seed: settings.seed } : {}),
  };
}
