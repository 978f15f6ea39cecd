"""Convert request fields to the engine's sampling, beam search and grammar parameters.

A field that a mode does not support is refused by its name, never dropped.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from chatcache.conversations.prompt import Function, argument_schemas
from chatcache.errors import ChatcacheError, InvalidRequestError, UnsupportedParameterError
from chatcache.gateway.schemas.requests import (
    MAX_TOOLS,
    CompletionBase,
    ConversationRef,
    FunctionFields,
    JsonSchemaFields,
    NamedTool,
    ResponseFormat,
    SamplingFields,
    StructuredFields,
    TextFormat,
    ToolChoiceFields,
    ToolFields,
)
from chatcache.tokenizer.bad_words import encode_bad_words
from chatcache.tokenizer.reply_format import ReplyFormat, decode_prompt_end
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.tokenizer.tool_formats import Functions
from chatcache.tokenizer.tool_grammar import CallableFunction, ToolChoice, build_tool_grammar
from chatcache.types.json_schema import relax_schema
from chatcache.types.request import (
    MAX_OUTPUT_LOGPROBS,
    BeamSearchParams,
    Params,
    SamplingParams,
    StructuredOutputs,
    num_branches,
)

Number = TypeVar("Number", int, float)

# Values of sampling fields that beam search accepts, because they have no effect.
_NEUTRAL_FOR_BEAMS: Mapping[str, tuple[object, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "distinct": (False,),
    "best_of": (1,),
}
# Values of beam search fields that sampling accepts, because they have no effect.
_NEUTRAL_FOR_SAMPLING: Mapping[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "early_stopping": (False,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
}


class RouteParams(NamedTuple):
    """Parameters whose request fields have different names on each route."""

    max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    stream_beams: bool = False


def to_params(fields: SamplingFields, route: RouteParams, tokenizer: Tokenizer) -> Params:
    """Build the engine's parameters. Raises: InvalidRequestError, UnsupportedParameterError."""
    max_tokens = route.max_tokens
    if fields.min_tokens is not None and max_tokens is not None and fields.min_tokens > max_tokens:
        raise InvalidRequestError(f"min_tokens must be at most max_tokens ({max_tokens})", param="min_tokens")
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_tokens(getattr(fields, name) or (), tokenizer.vocab_size, name)
    if fields.beam_width is not None or fields.use_beam_search:
        return _beam_params(fields, route, tokenizer)
    for name, neutral in _NEUTRAL_FOR_SAMPLING.items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise UnsupportedParameterError(f"{name} is for beam search (beam_width)", param=name)
    if route.stream_beams:
        raise UnsupportedParameterError("stream_beams is for beam search (beam_width)", param="stream_beams")
    if fields.best_of is not None and fields.best_of < _default(fields.n, 1):
        raise InvalidRequestError(f"best_of must be at least n ({_default(fields.n, 1)})", param="best_of")
    return SamplingParams(
        n=_default(fields.n, 1),
        best_of=fields.best_of,
        distinct=bool(fields.distinct),
        temperature=_default(fields.temperature, 1.0),
        top_p=_default(fields.top_p, 1.0),
        top_k=_default(fields.top_k, 0),
        min_p=_default(fields.min_p, 0.0),
        seed=fields.seed,
        **_common_params(fields, route, tokenizer),
    )


def _common_params(fields: SamplingFields, route: RouteParams, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the parameters that `SamplingParams` and `BeamSearchParams` have in common."""
    return {
        "repetition_penalty": _default(fields.repetition_penalty, 1.0),
        "presence_penalty": _default(fields.presence_penalty, 0.0),
        "frequency_penalty": _default(fields.frequency_penalty, 0.0),
        "logit_bias": _logit_bias(fields.logit_bias, tokenizer.vocab_size),
        "bad_words_ids": encode_bad_words(fields.bad_words or (), tokenizer),
        "allowed_token_ids": None if fields.allowed_token_ids is None else tuple(fields.allowed_token_ids),
        "max_tokens": route.max_tokens,
        "min_tokens": _default(fields.min_tokens, 0),
        "stop": _stop_strings(fields),
        "stop_token_ids": tuple(fields.stop_token_ids or ()),
        "include_stop_str_in_output": bool(fields.include_stop_str_in_output),
        "ignore_eos": bool(fields.ignore_eos),
        "skip_special_tokens": fields.skip_special_tokens is not False,
        "logprobs": route.logprobs,
        "prompt_logprobs": route.prompt_logprobs,
        "structured_outputs": route.structured_outputs,
    }


def _beam_params(fields: SamplingFields, route: RouteParams, tokenizer: Tokenizer) -> BeamSearchParams:
    for name, neutral in _NEUTRAL_FOR_BEAMS.items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            allowed = " or ".join(msgspec.json.encode(each).decode() for each in neutral)
            raise UnsupportedParameterError(
                f"{name} has no effect in beam search: leave it out, or send {allowed}", param=name
            )
    if fields.beam_width is not None:
        width, num_returned = fields.beam_width, _default(fields.n, 1)
    else:
        width = num_returned = _default(fields.n, 1)
    if num_returned > width:
        raise InvalidRequestError(f"n must be at most beam_width ({width})", param="n")
    return BeamSearchParams(
        beam_width=width,
        n=num_returned,
        length_penalty=_default(fields.length_penalty, 1.0),
        early_stopping=fields.early_stopping if fields.early_stopping is not None else False,
        num_beam_groups=_default(fields.num_beam_groups, 1),
        diversity_penalty=_default(fields.diversity_penalty, 0.0),
        stream_beams=route.stream_beams,
        **_common_params(fields, route, tokenizer),
    )


def clamp_max_tokens(params: Params, num_prompt_tokens: int, max_model_len: int, num_prompts: int = 1) -> Params:
    """Remove a `max_tokens` beyond the context, so that the engine generates as many tokens as fit.

    Agents send a constant limit, whatever the length of the context and of the prompt. Without a limit, as many tokens
    are generated as one response can carry log-probabilities of.

    Raises: InvalidRequestError for a `max_tokens` with too many log-probabilities.
    """
    room = max_model_len - num_prompt_tokens
    if params.max_tokens is not None and params.max_tokens > room:
        params = msgspec.structs.replace(params, max_tokens=None)
    if params.logprobs is None:
        return params
    num_per_token = num_prompts * num_branches(params) * (params.logprobs + 1)
    most = MAX_OUTPUT_LOGPROBS // num_per_token
    if params.max_tokens is None:
        return msgspec.structs.replace(params, max_tokens=most) if room > most else params
    if params.max_tokens > most:
        raise InvalidRequestError(
            f"max_tokens {params.max_tokens} with {num_per_token} log-probabilities per token is more than one answer "
            f"carries: max_tokens x n x (top_logprobs + 1) must be at most {MAX_OUTPUT_LOGPROBS}",
            param="max_tokens",
        )
    return params


def clamped_limit(wanted: int | None, params: Params, num_prompt_tokens: int, max_model_len: int) -> int | None:
    """Return the limit that replaced the `wanted` one in `params`; None if it was not clamped."""
    if params.max_tokens is None:
        return max_model_len - num_prompt_tokens if wanted is not None else None
    return params.max_tokens if params.logprobs is not None and params.max_tokens != wanted else None


def clamped_header(limit: int | None) -> dict[str, str]:
    """Build the header that reports a limit of `clamped_limit`."""
    return {} if limit is None else {"x-chatcache-max-tokens": str(limit)}


def check_stream(base: CompletionBase, sampling: SamplingFields) -> None:
    """Refuse to stream results that exist only at the end. Raises: UnsupportedParameterError."""
    if not base.stream:
        return
    if sampling.best_of is not None and sampling.best_of > _default(sampling.n, 1):
        raise UnsupportedParameterError(
            "best_of cannot be streamed: which are best is known at the end", param="best_of"
        )
    if base.prompt_logprobs is not None:
        raise UnsupportedParameterError("prompt_logprobs cannot be streamed", param="prompt_logprobs")


@contextlib.contextmanager
def rename_error_params(**names: str | None) -> Iterator[None]:
    """Replace the parameter names of the engine or the store in errors by the client's (None: keep the name)."""
    try:
        yield
    except ChatcacheError as error:
        error.param = names.get(error.param or "") or error.param
        raise


def conversation_id(conversation: str | ConversationRef | None) -> str | None:
    """Return the id of a `conversation` field, which is a string or an object."""
    return conversation.id if isinstance(conversation, ConversationRef) else conversation


def check_tokens(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Check that all are ids of the model; fast for a million. Raises: InvalidRequestError."""
    if tokens:
        check_token(min(tokens), vocab_size, param)
        check_token(max(tokens), vocab_size, param)


def check_token(token: int, vocab_size: int, param: str) -> None:
    """Check that `token` is an id of the model. Raises: InvalidRequestError."""
    if not 0 <= token < vocab_size:
        raise InvalidRequestError(
            f"{param}: token ids must be between 0 and {vocab_size - 1}, got {token}", param=param
        )


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        check_token(int(key), vocab_size, "logit_bias")
        found[int(key)] = value
    return found


def _stop_strings(fields: SamplingFields) -> tuple[str, ...]:
    if fields.stop is None:
        return ()
    return (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)


def _default(value: Number | None, default: Number) -> Number:
    return value if value is not None else default


_FORMATS = ("text", "json_object", "json_schema")


def structured_outputs(
    structured: StructuredFields | None,
    response_format: ResponseFormat | None = None,
    text_format: TextFormat | None = None,
) -> StructuredOutputs | None:
    """Combine `structured_outputs` (vLLM) and the formats of OpenAI; None for free text.

    Raises: InvalidRequestError with the name of the field.
    """
    if structured is None:
        if response_format is not None:
            if response_format.schema is not None:
                message = "the schema of response_format belongs in response_format.json_schema.schema"
                raise InvalidRequestError(message, param="response_format")
            return _parse_format(response_format.type, response_format.json_schema, "response_format", ".json_schema")
        if text_format is not None:
            return _parse_format(text_format.type, text_format, "text.format", "")
        return None
    if response_format is not None or text_format is not None:
        other = "response_format" if response_format is not None else "text"
        raise InvalidRequestError(f"structured_outputs and {other} exclude each other", param="structured_outputs")
    chosen = [name for name in structured.__struct_fields__ if getattr(structured, name) not in (None, False)]
    if len(chosen) != 1:
        names = ", ".join(structured.__struct_fields__)
        raise InvalidRequestError(f"structured_outputs must have exactly one of {names}", param="structured_outputs")
    return StructuredOutputs(
        json=structured.json
        if structured.json is None or isinstance(structured.json, str)
        else _to_json(structured.json),
        json_object=bool(structured.json_object),
        regex=structured.regex,
        choice=tuple(structured.choice or ()),
        grammar=structured.grammar,
    )


@contextlib.contextmanager
def rename_constraint_param(
    structured: StructuredFields | None, field: str, tools: str | None = None
) -> Iterator[None]:
    """Change `structured_outputs` in errors to the request field that set the constraint.

    This is `tools` if given, the name of the tool field; else `field`, unless the request itself has
    `structured_outputs`.
    """
    try:
        yield
    except InvalidRequestError as error:
        if (tools is not None or structured is None) and error.param == "structured_outputs":
            error.param = tools or field
            error.message = error.message.replace("structured_outputs", error.param)
        raise


def _parse_format(
    kind: str, schema: JsonSchemaFields | TextFormat | None, name: str, inside: str
) -> StructuredOutputs | None:
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise InvalidRequestError(f"{name}.type must be one of {', '.join(_FORMATS)}", param=f"{name}.type")
    for field in ("name", "schema"):
        if schema is None or getattr(schema, field) is None:
            raise InvalidRequestError(
                f"{name}{inside}.{field} is required",
                param=f"{name}{inside}.{field}",
                code="missing_required_parameter",
            )
    return schema_output(schema.schema, strict=bool(schema.strict)) if schema is not None else None


def schema_output(schema: object, *, strict: bool) -> StructuredOutputs:
    """Constrain the output to a JSON schema; unless it is `strict`, as far as possible."""
    return StructuredOutputs(json=_to_json(relax_schema(schema) if isinstance(schema, dict) and not strict else schema))


def _to_json(schema: object) -> str:
    return msgspec.json.encode(schema).decode()


MAX_SCHEMA_BYTES = 64 << 10
MAX_TOOLS_BYTES = 256 << 10
_MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and how the model may use them.

    `schemas`: functions that the model may call now, None if it may call none. `choice`: the value of `tool_choice`,
    repeated in the response. `limits`: the grammar constraint that enforces the choice, None for none.
    """

    functions: tuple[Function, ...] = ()
    schemas: Functions | None = None
    choice: object = "none"
    limits: ToolChoice | None = None
    parallel: bool = True


NO_TOOLS = ToolUse()


def parse_tool_choice(
    reply_format: ReplyFormat,
    tools: Sequence[ToolFields] | None,
    choice: str | ToolChoiceFields | None,
    parallel: bool | None,
) -> ToolUse:
    """Parse `tools`, `tool_choice` and `parallel_tool_calls` for a model with that reply format.

    Tools that are not functions are left out; `fields.unknown_fields` names them as ignored.

    Raises: InvalidRequestError, UnsupportedParameterError with the name of the field.
    """
    tools = tools or ()
    if not reply_format.supports_tools and any(tool.type in ToolFields.executed_types for tool in tools):
        raise UnsupportedParameterError("tools: this model's chat template does not support them", param="tools")
    functions = tuple(_parse_functions(tools, "tools"))
    if not functions:
        lists_none = (
            isinstance(choice, ToolChoiceFields)
            and choice.type == "allowed_tools"
            and not _allowed_functions(choice)[1]
        )
        if choice not in (None, "none", "auto") and not lists_none:
            more = " of type function; others are not executed here" if tools else ""
            raise UnsupportedParameterError(f"tool_choice needs tools{more}", param="tool_choice")
        return NO_TOOLS
    _check_functions(functions)
    mode, names = _parse_choice(choice, functions)
    echo = msgspec.to_builtins(choice) if choice is not None else "auto"
    if isinstance(echo, dict):
        echo = {name: value for name, value in echo.items() if value is not None}
    parallel = parallel is not False
    if mode == "none":
        return ToolUse(functions, None, echo, None, parallel)
    if reply_format.syntax is None:
        raise UnsupportedParameterError(
            "tools: how this model writes calls is not known to this server (--tool-call-parser)", param="tools"
        )
    enforced = mode == "required"
    callees = tuple(_callee(function, enforced=enforced) for function in functions if function.name in names)
    single = not parallel or (isinstance(choice, ToolChoiceFields) and choice.type == "function")
    limits = ToolChoice(callees, required=enforced, parallel=not single)
    schemas = argument_schemas(function for function in functions if function.name in names)
    return ToolUse(functions, schemas, echo, limits, parallel)


def constrain_to_tools(
    params: Params, use: ToolUse, reply_format: ReplyFormat, tokenizer: Tokenizer, prompt: Sequence[int]
) -> Params:
    """Constrain a reply to the allowed calls or the structured output.

    Raises: InvalidRequestError.
    """
    end = decode_prompt_end(tokenizer, prompt)
    outputs = params.structured_outputs
    limits = use.limits
    if outputs is not None and (limits is not None or reply_format.starts_in_reasoning(end)):
        answer = _content_schema(outputs)
        if answer is None:
            if limits is not None:
                raise InvalidRequestError(
                    "tools go with json and json_object only, not with other structured_outputs", param="tools"
                )
            return params
        limits = ToolChoice(
            limits.functions if limits is not None else (),
            required=limits is not None and limits.required,
            parallel=limits is None or limits.parallel,
            answer=answer,
        )
    if limits is None or limits.is_unconstrained:
        return params
    special = tokenizer.special_ids_of(reply_format.marks(tools=True))
    grammar = build_tool_grammar(limits, reply_format, special, end)
    constraint = StructuredOutputs(grammar=grammar, special_token_ids=tuple(special.values()))
    return msgspec.structs.replace(params, structured_outputs=constraint)


def _content_schema(outputs: StructuredOutputs) -> str | None:
    if outputs.json_object:
        return '{"type": "object"}'
    if outputs.json is None:
        return None
    try:
        schema = json.loads(outputs.json)
    except (ValueError, RecursionError):
        return None
    return json.dumps(schema) if isinstance(schema, dict) else None


def _parse_functions(tools: Sequence[ToolFields], param: str, namespace: str = "") -> Iterator[Function]:
    """Yield the functions among the tools; those of a namespace are named `namespace.name`."""
    for at, tool in enumerate(tools):
        where = f"{param}[{at}]"
        if tool.type == "function":
            function = _parse_function(tool, where)
            yield replace(function, name=f"{namespace}.{function.name}") if namespace else function
        elif tool.type == "namespace" and not namespace:
            if tool.name is None:
                raise InvalidRequestError(f"{where}.name is required", param=f"{where}.name")
            yield from _parse_functions(tool.tools or (), f"{where}.tools", tool.name)


def _parse_function(tool: ToolFields, where: str) -> Function:
    given = tool.function
    if given is None:
        if tool.name is None:
            raise InvalidRequestError(f"{where}.function is required", param=f"{where}.function")
        given = FunctionFields(tool.name, tool.description, tool.parameters, tool.strict)
    parameters = given.parameters
    if parameters is not None:
        parameters = {word: value for word, value in parameters.items() if value is not None}
        _check_schema(parameters, f"{where}.parameters")
    return Function(given.name, given.description, parameters, bool(given.strict))


def _check_schema(schema: Mapping[str, Any], param: str) -> None:
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(f'{param}.type must be "object"', param=f"{param}.type")
    size = len(msgspec.json.encode(schema))
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(f"{param} must have at most {MAX_SCHEMA_BYTES} bytes, got {size}", param=param)


def _check_functions(functions: Sequence[Function]) -> None:
    names = [function.name for function in functions]
    if len(names) > MAX_TOOLS:
        raise InvalidRequestError(f"tools must have at most {MAX_TOOLS} functions, got {len(names)}", param="tools")
    for at, name in enumerate(names):
        if name in names[:at]:
            raise InvalidRequestError(f"tools[{at}]: there are two functions {name!r}", param="tools")
    size = len(msgspec.json.encode([function.to_echo() for function in functions]))
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"tools must have at most {MAX_TOOLS_BYTES} bytes, got {size}", param="tools")


def _parse_choice(choice: str | ToolChoiceFields | None, functions: Sequence[Function]) -> tuple[str, frozenset[str]]:
    """Parse `tool_choice`: the mode, and the names of the functions that it allows."""
    known = frozenset(function.name for function in functions)
    if choice is None or isinstance(choice, str):
        if choice is not None and choice not in _MODES:
            raise InvalidRequestError(
                f"tool_choice must be one of {', '.join(_MODES)}, or name a function", param="tool_choice"
            )
        return choice or "auto", known
    if choice.type == "function":
        return "required", frozenset([_function_name(choice, known)])
    if choice.type != "allowed_tools":
        raise UnsupportedParameterError(
            f"tool_choice.type {choice.type[:40]!r} is not supported", param="tool_choice.type"
        )
    mode, tools = _allowed_functions(choice)
    return mode if tools else "none", frozenset(_function_name(tool, known) for tool in tools)


def _allowed_functions(choice: ToolChoiceFields) -> tuple[str, list[NamedTool]]:
    """Return the mode of `allowed_tools`, and those of the tools that are functions.

    Raises: InvalidRequestError; UnsupportedParameterError if a call is required and no tool is a function.
    """
    inner = choice.allowed_tools
    mode, tools = (inner.mode, inner.tools) if inner is not None else (choice.mode, choice.tools)
    if mode not in ("auto", "required"):
        raise InvalidRequestError("tool_choice.mode must be auto or required", param="tool_choice.mode")
    if not tools:
        raise InvalidRequestError("tool_choice.tools is required", param="tool_choice.tools")
    functions = [tool for tool in tools if tool.type in NamedTool.executed_types]
    if mode == "required" and not functions:
        raise UnsupportedParameterError(
            "tool_choice needs tools of type function; others are not executed here", param="tool_choice"
        )
    return mode, functions


def _function_name(tool: ToolChoiceFields | NamedTool, known: frozenset[str]) -> str:
    name = tool.function.name if tool.function is not None else tool.name
    if tool.type != "function" or name is None:
        raise InvalidRequestError("tool_choice must name a function", param="tool_choice")
    if name not in known:
        raise InvalidRequestError(f"tool_choice names {name[:64]!r}, which is not in tools", param="tool_choice")
    return name


def _callee(function: Function, *, enforced: bool) -> CallableFunction:
    """Convert a function for use in the grammar.

    `enforced`: constrain the arguments to their schema even if the function is not `strict`, as far as possible.
    """
    if not (enforced or function.strict):
        return CallableFunction(function.name)
    parameters = function.parameters
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {"type": "object", **parameters}
    return CallableFunction(function.name, json.dumps(schema if function.strict else relax_schema(schema)))
