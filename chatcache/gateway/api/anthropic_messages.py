"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

A message request becomes the same stateless chat as one of /v1/chat/completions. `MessageWriter` writes its reply as
content blocks.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.prompt import Message, Prompt, assistant_message, tool_calls_of, tool_message
from chatcache.conversations.prompt_history import PromptRecord
from chatcache.conversations.replies.events import ReplyDelta, ReplyDone, ReplyEvent, ReplyFinished, ReplyStarted
from chatcache.conversations.tree import ToolCall, new_id
from chatcache.errors import ContextLengthError, InvalidRequestError, NotFoundError, UnsupportedParameterError
from chatcache.gateway.api.cache_diagnosis import diagnose, message_diagnostics
from chatcache.gateway.api.chat_completions import ChatRequest, start_chat
from chatcache.gateway.api.generation import CompleteReply, arguments_object, reply_events, respond
from chatcache.gateway.api.params import (
    RouteParams,
    ToolUse,
    clamped_header,
    clamped_limit,
    parse_tool_choice,
    rename_constraint_param,
    rename_error_params,
    schema_output,
    to_params,
)
from chatcache.gateway.api.sse import SseFormat, named_sse_frame
from chatcache.gateway.api.thinking import Thinking, ThinkingSwitch, resolve_thinking
from chatcache.gateway.auth.principal import principal_of
from chatcache.gateway.context import Gateway, Model, gateway_of
from chatcache.gateway.errors import json_response, messages_error
from chatcache.gateway.middleware import read_json
from chatcache.gateway.schemas.anthropic import (
    AssistantMessage,
    BlockDelta,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    ContextEdit,
    InputJsonDelta,
    MessageDelta,
    MessageDiagnostics,
    MessageParam,
    MessagesEvent,
    MessagesOptions,
    MessagesPrompt,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputBlock,
    Ping,
    ResultBlock,
    SignatureDelta,
    StopDelta,
    StopReason,
    SystemBlock,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ThinkingTokens,
    TokenCount,
    ToolChoiceParam,
    ToolParam,
    ToolUseBlock,
)
from chatcache.gateway.schemas.fields import ignored_header, parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import (
    FunctionFields,
    NamedFunction,
    SamplingFields,
    ToolChoiceFields,
    ToolFields,
)
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.transfer.attachments import FileText, clean_name
from chatcache.types.events import FINISH_STOP
from chatcache.types.request import StructuredOutputs

Value = TypeVar("Value")

API_VERSIONS = ("2023-06-01", "2026-10-21")  # equal in what this server has of them
CLEAR_THINKING = "clear_thinking_20251015"
SIGNATURE = "chatcache"  # clients drop thinking blocks without a signature
# Claude Code begins its system prompt with a line that has this prefix and changes with the version and the session.
BILLING_LINE = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def create_message(request: Request) -> Response:
    """POST /v1/messages: stateless, streamed or not."""
    gateway = gateway_of(request)
    body = await read_json(request)
    prompt, options = parse_fields(body, MessagesPrompt), parse_fields(body, MessagesOptions)
    model = await gateway.require_model(prompt.model)
    thinking = _thinking(model, prompt)
    converted = _convert(request, model, body, prompt, thinking)
    tools = _tool_use(model, prompt)
    is_prewarming = options.max_tokens == 0
    max_tokens = 1 if is_prewarming else options.max_tokens
    sampling = SamplingFields(
        temperature=options.temperature, top_p=options.top_p, top_k=options.top_k, stop=options.stop_sequences
    )
    format_name = "output_format" if prompt.output_format is not None else "output_config.format"
    message_id = new_id("msg")
    diagnostics: MessageDiagnostics | None = None

    async def diagnose_prompt(assembled: Prompt) -> None:
        nonlocal diagnostics
        record = PromptRecord(converted.messages, tools.functions, array("i", assembled.token_ids))
        principal = principal_of(request)
        earlier_id = options.diagnostics.previous_message_id if options.diagnostics is not None else None
        if earlier_id is not None:
            diagnostics = message_diagnostics(await diagnose(gateway, principal, assembled, record, earlier_id))
        gateway.prompt_history.add(principal.owner, message_id, record)

    chat = ChatRequest(
        request_id=message_id,
        messages=converted.messages,
        tools=tools,
        params=to_params(sampling, RouteParams(max_tokens, None, structured_outputs=_format(prompt)), model.tokenizer),
        on_prompt=diagnose_prompt if options.diagnostics is not None else None,
        continues=converted.continues,
        thinking=thinking,
    )
    with (
        _rename_context_error(),
        rename_error_params(stop="stop_sequences"),
        rename_constraint_param(None, format_name, "tools" if tools.limits else None),
    ):
        reply = await start_chat(request, model, chat)
    limit = clamped_limit(max_tokens, reply.request.params, len(reply.request.prompt), gateway.max_model_len)
    return await respond(
        request,
        lambda: reply_events(reply, gateway.metrics),
        (reply,),
        MessageWriter(
            gateway,
            reply.request.request_id,
            reports_writes=_has_cache_control(prompt),
            is_silent=is_prewarming,
            diagnostics=diagnostics if options.diagnostics is not None else UNSET,
        ),
        stream=bool(options.stream),
        headers=ignored_header(converted.ignored) | clamped_header(limit),
        format=_sse_format(request),
    )


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens: length of the prompt. Nothing is computed or stored."""
    gateway, principal = gateway_of(request), principal_of(request)
    body = await read_json(request)
    prompt = parse_fields(body, MessagesPrompt)
    model = await gateway.require_model(prompt.model)
    thinking = _thinking(model, prompt)
    converted = _convert(request, model, body, prompt, thinking)
    functions = _tool_use(model, prompt).functions
    with _rename_context_error():
        async with gateway.tokenize_throttle.acquire(principal.owner, len(await request.body())):
            assembled = await model.service.prompt(
                converted.messages,
                principal.tenant,
                functions,
                continues=converted.continues,
                kwargs=thinking.kwargs,
                keeps_reasoning=bool(thinking.preserves),
            )
    return json_response(TokenCount(len(assembled.token_ids)), headers=ignored_header(converted.ignored))


@contextlib.contextmanager
def _rename_context_error() -> Iterator[None]:
    """Begin the message of a ContextLengthError with the words by which clients recognise it and compact."""
    try:
        yield
    except ContextLengthError as error:
        error.message = f"prompt is too long: {error.message}"
        raise


def _tool_use(model: Model, prompt: MessagesPrompt) -> ToolUse:
    """Parse the tools. Raises: InvalidRequestError, UnsupportedParameterError."""
    tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(prompt.tools or ())]
    choice = prompt.tool_choice
    parallel = not (choice is not None and choice.disable_parallel_tool_use)
    return parse_tool_choice(model.service.reply_format, tools, _choice(choice), parallel)


def _tool(tool: ToolParam, where: str) -> ToolFields:
    if tool.type not in ToolParam.executed_types:
        return ToolFields(type=str(tool.type))
    for name in ("name", "input_schema"):
        if getattr(tool, name) is None:
            raise _missing(f"{where}.{name}")
    return ToolFields(function=FunctionFields(tool.name or "", tool.description, tool.input_schema, tool.strict))


def _choice(choice: ToolChoiceParam | None) -> str | ToolChoiceFields | None:
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise _missing("tool_choice.name")
    return ToolChoiceFields("function", NamedFunction(choice.name))


def _format(prompt: MessagesPrompt) -> StructuredOutputs | None:
    """Return the constraint of the answer. Raises: InvalidRequestError if the request has both of its names."""
    wanted = prompt.output_config.format if prompt.output_config is not None else None
    if prompt.output_format is not None:
        if wanted is not None:
            raise InvalidRequestError(
                "output_format and output_config.format exclude each other", param="output_format"
            )
        wanted = prompt.output_format
    return schema_output(wanted.schema, strict=True) if wanted is not None else None


def _thinking(model: Model, prompt: MessagesPrompt) -> Thinking:
    """Resolve the controls of the reasoning. Raises: InvalidRequestError, UnsupportedParameterError."""
    given, config = prompt.thinking, prompt.output_config
    edits = (prompt.context_management.edits if prompt.context_management is not None else None) or ()
    keeps = any(map(_keeps_thinking, edits))
    return resolve_thinking(
        model.service.thinking,
        switch=ThinkingSwitch(given.type != "disabled", "thinking.type") if given is not None else None,
        effort=config.effort if config is not None else None,
        effort_name="output_config.effort",
        budget=given.budget_tokens if given is not None else None,
        budget_name="thinking.budget_tokens",
        preserves=True if keeps and model.service.thinking.can_reason else None,
    )


def _keeps_thinking(edit: ContextEdit) -> bool:
    return edit.type == CLEAR_THINKING and edit.keep == "all"


def _has_cache_control(prompt: MessagesPrompt) -> bool:
    blocks: list[SystemBlock | ToolParam | ContentBlock | ResultBlock] = [*(prompt.tools or ())]
    blocks += prompt.system if isinstance(prompt.system, list) else ()
    for message in prompt.messages:
        for block in message.content if isinstance(message.content, list) else ():
            blocks.append(block)
            blocks += block.content if isinstance(block.content, list) else ()
    return prompt.cache_control is not None or any(block.cache_control is not None for block in blocks)


class _Converted(NamedTuple):
    """The messages of a chat, and the names of the ignored fields.

    `continues`: the last message is the beginning of the answer.
    """

    messages: tuple[Message, ...]
    ignored: tuple[str, ...]
    continues: bool = False


def _convert(
    request: Request, model: Model, body: dict[str, Any], prompt: MessagesPrompt, thinking: Thinking
) -> _Converted:
    """Convert the system prompt and the messages. Raises: InvalidRequestError, UnsupportedParameterError."""
    ignored = dict.fromkeys((*unknown_fields(body, MessagesPrompt, MessagesOptions), *thinking.ignored))
    edits = prompt.context_management.edits if prompt.context_management is not None else None
    if edits and not (thinking.preserves and all(map(_keeps_thinking, edits))):
        ignored["context_management.edits"] = None
    if "anthropic-beta" in request.headers:
        ignored["anthropic-beta"] = None
    if request.headers.get("anthropic-version", API_VERSIONS[0]) not in API_VERSIONS:
        ignored["anthropic-version"] = None
    if prompt.thread is not None:
        if prompt.thread.type == "continue":
            raise NotFoundError(
                "thread: this server holds no threads; send all messages", param="thread", code="thread_not_found"
            )
        ignored["thread"] = None
    messages: list[Message] = []
    late_role = "system" if _accepts_late_system(model.tokenizer) else "user"
    if prompt.system:
        blocks = [prompt.system] if isinstance(prompt.system, str) else [block.text for block in prompt.system]
        if any(text.startswith(BILLING_LINE) for text in blocks):
            ignored[f"system.{BILLING_LINE.removesuffix(':')}"] = None
        if texts := [text for text in map(_without_billing_line, blocks) if text]:
            messages.append(Message(role="system", content="\n".join(texts)))
    for at, message in enumerate(prompt.messages):
        for each in _messages(message, f"messages[{at}]"):
            if each["role"] == "system" and messages:
                each["role"] = late_role
            _append(messages, each)
        for block in message.content if isinstance(message.content, list) else ():
            if block.is_error:
                ignored["messages.content.is_error"] = None
            if block.type == "redacted_thinking":
                ignored["messages.content.redacted_thinking"] = None
    continues = messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in messages[-1]:
        raise InvalidRequestError(
            "messages: the last one has a tool_use without a tool_result, and cannot be continued", param="messages"
        )
    return _Converted(tuple(messages), tuple(ignored), continues)


@lru_cache(maxsize=4)
def _accepts_late_system(tokenizer: Tokenizer) -> bool:
    """Whether the chat template renders a system message that follows another message."""
    late = "late instructions"
    messages = [Message(role="user", content="Hello"), Message(role="system", content=late)]
    try:
        return late in tokenizer.render(messages)
    except InvalidRequestError:
        return False


def _append(messages: list[Message], message: Message) -> None:
    """Append a message; consecutive ones of the user or the assistant are one turn."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != message["role"] or message["role"] not in ("user", "assistant"):
        messages.append(message)
    elif message["role"] == "user":
        messages[-1] = Message(role="user", content=f"{last['content']}\n{message['content']}")
    else:
        reasoning = last.get("reasoning_content", "") + message.get("reasoning_content", "")
        calls = (*tool_calls_of(last), *tool_calls_of(message))
        messages[-1] = assistant_message(last["content"] + message["content"], reasoning, calls)


def _without_billing_line(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_LINE) else text


def _messages(message: MessageParam, where: str) -> Iterable[Message]:
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    if message.role == "assistant":
        return [_assistant_message(message.content, f"{where}.content")]
    return _user_messages(message.role, message.content, f"{where}.content")


def _assistant_message(blocks: Sequence[ContentBlock], where: str) -> Message:
    text, reasoning, calls = "", "", []
    for at, block in enumerate(blocks):
        path = f"{where}[{at}]"
        match block.type:
            case "text":
                text += _required(block.text, f"{path}.text")
            case "thinking":
                reasoning += _required(block.thinking, f"{path}.thinking")
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = json.dumps(_required(block.input, f"{path}.input"), ensure_ascii=False)
                name = _required(block.name, f"{path}.name")
                calls.append(ToolCall(_required(block.id, f"{path}.id"), name, arguments))
            case _:
                raise _unsupported(block.type, path)
    return assistant_message(text, reasoning, calls)


def _user_messages(role: str, blocks: Sequence[ContentBlock], where: str) -> Iterator[Message]:
    """Yield one message for each run of text blocks and for each tool result."""
    texts: list[str] = []
    for at, block in enumerate(blocks):
        path = f"{where}[{at}]"
        if block.type == "text":
            texts.append(_required(block.text, f"{path}.text"))
        elif block.type == "document" and role == "user":
            texts.append(_document_text(block, path))
        elif block.type == "tool_result" and role == "user":
            if texts:
                yield Message(role=role, content="\n".join(texts))
            texts = []
            call_id = _required(block.tool_use_id, f"{path}.tool_use_id")
            yield tool_message(_result_text(block.content, f"{path}.content"), call_id)
        else:
            raise _unsupported(block.type, path)
    if texts or not blocks:
        yield Message(role=role, content="\n".join(texts))


def _document_text(block: ContentBlock, where: str) -> str:
    """Return a document of the source type text as other APIs put a file into a message."""
    source = _required(block.source, f"{where}.source")
    if source.type != "text":
        raise UnsupportedParameterError(
            f"{where}.source: documents are text here (type text); POST /v1/attachments returns the text of a PDF",
            param=f"{where}.source.type",
        )
    try:
        name = clean_name(block.title or "document")
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, param=f"{where}.title", code=error.code) from None
    return FileText(name, _required(source.data, f"{where}.source.data")).block


def _result_text(content: str | Sequence[ResultBlock] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for at, block in enumerate(content):
        if block.type != "text":
            raise _unsupported(block.type, f"{where}[{at}]")
    return "\n".join(_required(block.text, f"{where}[{at}].text") for at, block in enumerate(content))


def _required(value: Value | None, param: str) -> Value:
    if value is None:
        raise _missing(param)
    return value


def _missing(param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is required", param=param, code="missing_required_parameter")


def _unsupported(kind: str, where: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(
        f"{where}: blocks of type {kind[:40]!r} are not supported here; this server reads text only",
        param=f"{where}.type",
    )


def _sse_format(request: Request) -> SseFormat:
    """Return the format of the API's streams: each event has its name, and no frame follows the last event."""
    return SseFormat(
        encode_event=_encode_event,
        encode_error=lambda error: named_sse_frame("error", messages_error(error, request.scope)),
        end=b"",
        final=(b"event: message_stop", b"event: error"),
        keep_alive=_encode_event(Ping()),
    )


def _encode_event(event: object) -> bytes:
    return named_sse_frame(str(cast(msgspec.Struct, event).__struct_config__.tag), event)


class _Piece(NamedTuple):
    """A part of a content block. A piece with a call id begins a new block, as does one of another kind."""

    kind: str
    text: str
    call_id: str = ""
    name: str = ""


def _pieces(delta: ReplyDelta) -> Iterator[_Piece]:
    if delta.reasoning:
        yield _Piece("thinking", delta.reasoning)
    if delta.text:
        yield _Piece("text", delta.text)
    for call in delta.calls:
        yield _Piece("tool_use", call.arguments, call.call_id, call.name)


@dataclass(slots=True)
class _BlockEvents:
    """Writes the deltas of a reply as events of content blocks, one block after the other."""

    index: int = -1
    kind: str = ""

    def push(self, delta: ReplyDelta) -> Iterator[MessagesEvent]:
        for piece in _pieces(delta):
            if piece.kind != self.kind or piece.call_id:
                yield from self.close()
                self.index, self.kind = self.index + 1, piece.kind
                yield ContentBlockStart(self.index, _new_block(piece))
                if self.index == 0:
                    yield Ping()
            if piece.text:
                yield ContentBlockDelta(self.index, _block_delta(piece))

    def close(self) -> Iterator[MessagesEvent]:
        """End the open block, if any."""
        if self.kind == "thinking":
            yield ContentBlockDelta(self.index, SignatureDelta(SIGNATURE))
        if self.kind:
            yield ContentBlockStop(self.index)
        self.kind = ""


def _new_block(piece: _Piece) -> OutputBlock:
    match piece.kind:
        case "thinking":
            return ThinkingBlock("", "")
        case "text":
            return TextBlock("")
    return ToolUseBlock(piece.call_id, piece.name, {})


def _block_delta(piece: _Piece) -> BlockDelta:
    match piece.kind:
        case "thinking":
            return ThinkingDelta(piece.text)
        case "text":
            return TextDelta(piece.text)
    return InputJsonDelta(piece.text)


def _content(deltas: Iterable[ReplyDelta]) -> list[OutputBlock]:
    """Return the content blocks that the events of `_BlockEvents` add up to."""
    blocks: list[tuple[_Piece, list[str]]] = []
    for delta in deltas:
        for piece in _pieces(delta):
            if not blocks or piece.kind != blocks[-1][0].kind or piece.call_id:
                blocks.append((piece, []))
            blocks[-1][1].append(piece.text)
    return [_whole_block(first, "".join(texts)) for first, texts in blocks]


def _whole_block(first: _Piece, text: str) -> OutputBlock:
    match first.kind:
        case "thinking":
            return ThinkingBlock(text, SIGNATURE)
        case "text":
            return TextBlock(text)
    return ToolUseBlock(first.call_id, first.name, arguments_object(text))


class MessageWriter:
    """Converts the events of a reply to the body or the events of one message.

    `reports_writes`: report the computed prompt tokens as written to the cache. `is_silent`: leave out the
    content; the one token that the engine computes is not reported.
    """

    def __init__(
        self,
        gateway: Gateway,
        message_id: str,
        *,
        reports_writes: bool,
        is_silent: bool = False,
        diagnostics: MessageDiagnostics | UnsetType | None = UNSET,
    ) -> None:
        self._id = message_id
        self._model = gateway.model_name
        self._reports_writes = reports_writes
        self._is_silent = is_silent
        self._diagnostics = diagnostics

    def body(self, reply: CompleteReply) -> AssistantMessage:
        (done,) = reply.dones
        stop = self._stop(done)
        content = [] if self._is_silent else _content(reply.deltas.get(0, ()))
        return self._message(content, self._usage(reply.finished), stop.stop_reason, stop.stop_sequence)

    async def chunks(self, events: AsyncIterator[ReplyEvent]) -> AsyncIterator[object]:
        blocks = _BlockEvents()
        stop = StopDelta("end_turn", None)
        async for event in events:
            if isinstance(event, ReplyStarted):
                counts = ReplyFinished(event.num_prompt_tokens, event.num_cached_tokens, num_output_tokens=0)
                yield MessageStart(self._message([], self._usage(counts)))
            elif isinstance(event, ReplyDelta):
                for each in () if self._is_silent else blocks.push(event):
                    yield each
            elif isinstance(event, ReplyDone):
                for each in blocks.close():
                    yield each
                stop = self._stop(event)
            elif isinstance(event, ReplyFinished):
                yield MessageDelta(stop, self._usage(event))
                yield MessageStop()

    def _message(
        self,
        content: list[OutputBlock],
        usage: MessageUsage,
        stop_reason: StopReason | None = None,
        stop_sequence: str | None = None,
    ) -> AssistantMessage:
        return AssistantMessage(
            self._id, "assistant", self._model, content, stop_reason, stop_sequence, usage, self._diagnostics
        )

    def _usage(self, counts: ReplyFinished) -> MessageUsage:
        num_computed = counts.num_prompt_tokens - counts.num_cached_tokens
        num_written = num_computed if self._reports_writes else 0
        return MessageUsage(
            input_tokens=num_computed - num_written,
            cache_creation_input_tokens=num_written,
            cache_read_input_tokens=counts.num_cached_tokens,
            output_tokens=0 if self._is_silent else counts.num_output_tokens,
            output_tokens_details=ThinkingTokens(0 if self._is_silent else counts.num_reasoning_tokens),
        )

    def _stop(self, done: ReplyDone) -> StopDelta:
        return StopDelta("max_tokens", None) if self._is_silent else _stop(done)


def _stop(done: ReplyDone) -> StopDelta:
    """Convert the end of a candidate to Anthropic's stop reason."""
    if done.finish_reason != FINISH_STOP:
        return StopDelta("max_tokens", None)
    if done.ends_in_calls:
        return StopDelta("tool_use", None)
    if isinstance(done.stop_reason, str):
        return StopDelta("stop_sequence", done.stop_reason)
    return StopDelta("end_turn", None)
