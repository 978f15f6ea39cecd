// Frames of the Responses WebSocket, subprotocol `chatcache.v1`: the fields that the page reads.
// The protocol is documented in chatcache/gateway/docs/websocket.md.

export interface WireUsage {
  readonly input_tokens: number;
  readonly output_tokens: number;
  readonly input_tokens_details?: { readonly cached_tokens?: number };
  readonly output_tokens_details?: { readonly reasoning_tokens?: number };
}

export interface WireItem {
  readonly id: string;
  readonly type?: string; // "message" if absent; also reasoning, function_call
  readonly candidate?: number; // index of the candidate; if absent, the output_index is the candidate
  readonly status?: string;
  readonly finish_reason?: string | null;
}

/** A function call of a candidate. */
export interface WireCall {
  readonly call_id: string;
  readonly name: string;
  readonly namespace?: string;
  readonly arguments: string; // JSON, which may be cut off
  readonly candidate: number;
}

export interface WireOutput {
  readonly item_id: string;
  readonly output_index: number;
  readonly type: string;
  readonly candidate?: number;
  readonly text?: string; // text of the message or of the reasoning
  readonly call_id?: string; // of a call, with the other fields of `WireCall`
}

interface WireError {
  readonly message: string;
  readonly code?: string | null;
  readonly param?: string | null;
}

export type JsonObject = Readonly<Record<string, unknown>>;

export interface WireResponse {
  readonly id: string;
  readonly status: string;
  readonly conversation?: { readonly id: string } | null;
  readonly input_item_ids?: readonly string[];
  readonly parent_item_id?: string | null; // the message that the outputs follow
  readonly n?: number;
  readonly beam_width?: number;
  readonly instructions?: string | null;
  readonly temperature?: number | null;
  readonly top_p?: number | null;
  readonly reasoning?: { readonly effort: string | null };
  readonly text?: { readonly format: { readonly type: string; readonly schema?: JsonObject } };
  readonly usage?: WireUsage | null;
  readonly error?: WireError | null;
  readonly incomplete_details?: { readonly reason: string } | null;
}

export interface WireConversation {
  readonly id: string;
  readonly title: string | null;
  readonly created_at: number;
  readonly updated_at: number;
  readonly active_leaf: string | null;
  readonly rev: number;
  readonly metadata?: Readonly<Record<string, string>> | null;
}

export interface StoredItem {
  readonly id: string;
  readonly role: string;
  readonly status: string;
  readonly content: readonly { readonly type: string; readonly text: string }[];
  readonly parent_id: string | null;
  readonly response_id: string | null;
  readonly index: number | null;
  readonly num_tokens: number | null; // null: token ids are not stored
  readonly finish_reason: string | null;
  readonly created_at: number;
  readonly usage?: WireUsage | null;
  readonly incomplete_details?: { readonly reason: string };
  readonly statistics?: WireStatistics;
  readonly calls?: readonly WireCall[];
  readonly call_id?: string; // of the call whose output this is; the role is then "tool"
}

/** Figures of a response that has ended. */
export interface WireStatistics {
  readonly first_token_ms: number | null;
  readonly decode_ms: number | null;
  readonly copied_pages: number | null;
  readonly miss: CacheMiss | null;
  readonly fork_at: number | null; // number of tokens shared with the answer that it continues
  readonly receipt: StopReceipt | null;
}

export interface Session {
  readonly model: string;
  readonly max_model_len: number | null; // null while the model loads
  readonly limits: { readonly max_frame_bytes: number; readonly max_n: number; readonly max_beam_width: number };
}

/** First token of a prompt that was not cached, and the reason. */
export interface CacheMiss {
  readonly reason: string;
  readonly at_token: number;
  readonly detail: string;
}

export interface StopReceipt {
  readonly tokens_after_stop: number;
  readonly pages_freed: number;
  readonly stop_latency_ms: number;
}

export interface WireBeamNode {
  readonly id: number;
  readonly parent: number; // 0: the prompt
  readonly text: string;
  readonly score: number;
}

export interface RunningResponse {
  readonly response_id: string;
  readonly conversation_id: string;
}

type StreamFields = { readonly stream_id?: string; readonly sequence_number?: number };

export type ServerFrame = StreamFields &
  (
    | { readonly type: "session.created"; readonly session: Session }
    | { readonly type: "response.resumed"; readonly response_id: string }
    | { readonly type: "response.created"; readonly response: WireResponse }
    | {
        readonly type: "response.progress";
        readonly response_id: string;
        readonly phase: "queued" | "decode";
        readonly input_tokens: number | null;
        readonly cached_tokens: number | null;
        readonly copied_pages?: number | null;
        readonly miss?: CacheMiss | null;
      }
    | { readonly type: "response.beam"; readonly nodes: readonly WireBeamNode[]; readonly live: readonly number[] }
    | { readonly type: "response.output_item.added"; readonly output_index: number; readonly item: WireItem }
    | { readonly type: "response.output_text.delta"; readonly output_index: number; readonly delta: string }
    | { readonly type: "response.output_text.done"; readonly output_index: number; readonly text: string }
    | { readonly type: "response.reasoning_text.delta"; readonly output_index: number; readonly delta: string }
    | { readonly type: "response.reasoning_text.done"; readonly output_index: number; readonly text: string }
    | { readonly type: "response.dropped"; readonly candidate: number; readonly receipt: StopReceipt }
    | {
        readonly type: "prompt.prewarmed";
        readonly status: "done" | "busy";
        readonly input_tokens: number;
        readonly cached_tokens: number;
        readonly warm_tokens: number;
      }
    | {
        readonly type: "response.output_item.done";
        readonly output_index: number;
        readonly item: WireItem | (WireItem & WireCall);
      }
    // replaces frames that were dropped because the client was too slow
    | { readonly type: "response.snapshot"; readonly outputs: readonly WireOutput[] }
    | {
        readonly type: "response.completed" | "response.incomplete";
        readonly response: WireResponse;
        readonly statistics?: WireStatistics;
        readonly saved?: false;
      }
    | { readonly type: "response.failed"; readonly response: WireResponse; readonly saved?: false }
    | {
        readonly type: "conversation.updated";
        readonly conversation: WireConversation;
        readonly running?: readonly string[]; // sent to subscribers: running responses of the conversation
      }
    | { readonly type: "conversation.subscribed" | "conversation.missed"; readonly running: readonly RunningResponse[] }
    | { readonly type: "conversation.deleted"; readonly conversation_id: string }
    | { readonly type: "error"; readonly error: WireError; readonly status?: number }
  );

type InputItem =
  | { readonly role: "user" | "assistant"; readonly content: string }
  | { readonly type: "function_call_output"; readonly call_id: string; readonly output: string };

/** Functions that the model may call, in namespaces. */
export interface ToolFields {
  readonly tools?: readonly {
    readonly type: "namespace";
    readonly name: string;
    readonly tools: readonly {
      readonly type: "function";
      readonly name: string;
      readonly description: string;
      readonly parameters: JsonObject;
    }[];
  }[];
}

/** Position in the message tree from which a request continues, and the input that it adds. */
export interface Continuation {
  readonly input: readonly InputItem[];
  readonly continue_final_message?: true; // the answer begins with the last message of the input
  readonly conversation?: string;
  readonly previous_item_id?: string;
  readonly fork_at?: number; // number of tokens of that message to keep
  readonly fork_with?: number; // id of the token that follows them
}

export interface CreateFrame extends Continuation, ToolFields {
  readonly type: "response.create";
  readonly stream_id: string;
  readonly idempotency_key: string;
  readonly instructions?: string;
  readonly explain?: boolean;
  readonly n?: number;
  readonly beam_width?: number;
  readonly stream_beams?: boolean;
  readonly temperature?: number;
  readonly top_p?: number;
  readonly top_k?: number;
  readonly min_p?: number;
  readonly presence_penalty?: number;
  readonly frequency_penalty?: number;
  readonly repetition_penalty?: number;
  readonly stop?: readonly string[];
  readonly min_tokens?: number;
  readonly thinking_token_budget?: number;
  readonly logit_bias?: Readonly<Record<string, number>>;
  readonly bad_words?: readonly string[];
  readonly allowed_token_ids?: readonly number[];
  readonly stop_token_ids?: readonly number[];
  readonly ignore_eos?: boolean;
  readonly include_stop_str_in_output?: boolean;
  readonly length_penalty?: number;
  readonly early_stopping?: boolean | "never";
  readonly num_beam_groups?: number;
  readonly diversity_penalty?: number;
  readonly text?: {
    readonly format: { readonly type: "json_schema"; readonly name: string; readonly schema: JsonObject };
  };
  readonly reasoning?: { readonly effort: string };
  readonly max_output_tokens?: number;
  readonly seed?: number;
}

export type ClientFrame =
  | CreateFrame
  | { readonly type: "response.cancel"; readonly response_id: string; readonly reason?: "steered" }
  | { readonly type: "response.drop"; readonly response_id: string; readonly candidate: number }
  | (Continuation & ToolFields & { readonly type: "prompt.prewarm"; readonly instructions?: string })
  | { readonly type: "conversation.subscribe" }
  | {
      readonly type: "response.resume";
      readonly response_id: string;
      readonly starting_after: number; // sequence_number of the last frame received; -1: none
      readonly stream_id: string;
    };
