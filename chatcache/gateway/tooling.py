"""`tools`, `tool_choice` and `parallel_tool_calls`: what a model is told of, what it may call, and how that is held."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from chatcache.chat.tools import Function
from chatcache.errors import InvalidRequest, UnsupportedParameter
from chatcache.gateway.wire_messages import FunctionFields, NamedTool, ToolChoiceFields, ToolFields
from chatcache.text.reply_format import ReplyFormat, prompt_end
from chatcache.text.tokenizer import Tokenizer
from chatcache.text.tool_calls.grammar import Callee, ToolChoice, call_grammar
from chatcache.types.params import Params, StructuredOutputs

MAX_SCHEMA_BYTES = 64 << 10
MAX_TOOLS_BYTES = 256 << 10
_MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools. `names`: the functions that may be called now, None for none.

    `choice` repeats what was asked for; `limits` is how the reply is held to it.
    """

    functions: tuple[Function, ...] = ()
    names: frozenset[str] | None = None
    choice: object = "none"
    limits: ToolChoice | None = None
    parallel: bool = True


NO_TOOLS = ToolUse()


def tool_use(
    form: ReplyFormat,
    tools: Sequence[ToolFields] | None,
    choice: str | ToolChoiceFields | None,
    parallel: bool | None,
) -> ToolUse:
    """Read the three fields for a model with that format. Raises: InvalidRequest, UnsupportedParameter by field."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise UnsupportedParameter("tool_choice needs tools", param="tool_choice")
        return NO_TOOLS
    if not form.shows_tools:
        raise UnsupportedParameter("tools: this model's chat template has no place for them", param="tools")
    functions = tuple(_function(tool, f"tools[{at}]") for at, tool in enumerate(tools))
    _check(functions)
    mode, names = _chosen(choice, functions)
    echo = msgspec.to_builtins(choice) if choice is not None else "auto"
    if isinstance(echo, dict):
        echo = {name: value for name, value in echo.items() if value is not None}
    parallel = parallel is not False
    if mode == "none":
        return ToolUse(functions, None, echo, None, parallel)
    if form.syntax is None:
        raise UnsupportedParameter(
            "tools: how this model writes calls is not known to this server (--tool-call-parser)", param="tools"
        )
    held = mode == "required"
    callees = tuple(_callee(function, held=held) for function in functions if function.name in names)
    single = not parallel or (isinstance(choice, ToolChoiceFields) and choice.type == "function")
    limits = ToolChoice(callees, required=held, parallel=not single)
    return ToolUse(functions, names, echo, limits, parallel)


def held_to(params: Params, use: ToolUse, form: ReplyFormat, tokenizer: Tokenizer, prompt: Sequence[int]) -> Params:
    """Hold a reply to what may be called, and what else it may be. Raises: InvalidRequest naming the field."""
    end = prompt_end(tokenizer, prompt)
    asked = params.structured_outputs
    limits = use.limits
    if asked is not None and (limits is not None or form.begins_inside(end)):
        answer = _answer(asked)
        if answer is None:
            if limits is not None:
                raise InvalidRequest(
                    "tools go with json and json_object only, not with other structured_outputs", param="tools"
                )
            return params
        limits = ToolChoice(
            limits.callees if limits is not None else (),
            required=limits is not None and limits.required,
            parallel=limits is None or limits.parallel,
            answer=answer,
        )
    if limits is None or limits.is_free:
        return params
    special = tokenizer.special_of(form.marks(tools=True))
    grammar = call_grammar(limits, form, special, end)
    outputs = StructuredOutputs(grammar=grammar, special_token_ids=tuple(special.values()))
    return msgspec.structs.replace(params, structured_outputs=outputs)


def _answer(outputs: StructuredOutputs) -> str | None:
    if outputs.json_object:
        return '{"type": "object"}'
    if outputs.json is None:
        return None
    try:
        schema = json.loads(outputs.json)
    except (ValueError, RecursionError):
        return None
    return json.dumps(schema) if isinstance(schema, dict) else None


def _function(tool: ToolFields, where: str) -> Function:
    if tool.type != "function":
        raise UnsupportedParameter(
            f"{where}.type {tool.type[:40]!r} is not supported: only functions are", param=f"{where}.type"
        )
    given = tool.function
    if given is None:
        if tool.name is None:
            raise InvalidRequest(f"{where}.function is required", param=f"{where}.function")
        given = FunctionFields(tool.name, tool.description, tool.parameters, tool.strict)
    parameters = given.parameters
    if parameters is not None:
        _check_schema(parameters, f"{where}.parameters")
    return Function(given.name, given.description, parameters, bool(given.strict))


def _check_schema(schema: Mapping[str, Any], param: str) -> None:
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f'{param}.type must be "object"', param=f"{param}.type")
    size = len(msgspec.json.encode(schema))
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{param} must have at most {MAX_SCHEMA_BYTES} bytes, got {size}", param=param)


def _check(functions: Sequence[Function]) -> None:
    names = [function.name for function in functions]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise InvalidRequest(f"tools[{at}]: there are two functions {name!r}", param="tools")
    size = len(msgspec.json.encode([function.echo() for function in functions]))
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"tools must have at most {MAX_TOOLS_BYTES} bytes, got {size}", param="tools")


def _chosen(choice: str | ToolChoiceFields | None, functions: Sequence[Function]) -> tuple[str, frozenset[str]]:
    """The mode, and the functions it is about."""
    known = frozenset(function.name for function in functions)
    if choice is None or isinstance(choice, str):
        if choice is not None and choice not in _MODES:
            raise InvalidRequest(
                f"tool_choice must be one of {', '.join(_MODES)}, or name a function", param="tool_choice"
            )
        return choice or "auto", known
    if choice.type == "function":
        return "required", frozenset([_named(choice, known)])
    if choice.type != "allowed_tools":
        raise UnsupportedParameter(f"tool_choice.type {choice.type[:40]!r} is not supported", param="tool_choice.type")
    inner = choice.allowed_tools
    mode, tools = (inner.mode, inner.tools) if inner is not None else (choice.mode, choice.tools)
    if mode not in ("auto", "required"):
        raise InvalidRequest("tool_choice.mode must be auto or required", param="tool_choice.mode")
    if not tools:
        raise InvalidRequest("tool_choice.tools is required", param="tool_choice.tools")
    return mode, frozenset(_named(tool, known) for tool in tools)


def _named(tool: ToolChoiceFields | NamedTool, known: frozenset[str]) -> str:
    name = tool.function.name if tool.function is not None else tool.name
    if tool.type != "function" or name is None:
        raise InvalidRequest("tool_choice must name a function", param="tool_choice")
    if name not in known:
        raise InvalidRequest(f"tool_choice names {name[:64]!r}, which is not in tools", param="tool_choice")
    return name


def _callee(function: Function, *, held: bool) -> Callee:
    """`held`: arguments are held to the schema whether it is strict or not."""
    if not (held or function.strict):
        return Callee(function.name)
    parameters = function.parameters
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    return Callee(function.name, json.dumps({"type": "object", **parameters}))
