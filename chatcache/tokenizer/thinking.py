"""What a chat template offers to control a model's reasoning, found by rendering probe chats.

Templates differ in their variables: Qwen, GLM and SmolLM read `enable_thinking`, DeepSeek and Granite `thinking`,
gpt-oss and Mistral `reasoning_effort`, and a few keep the reasoning of earlier replies on request. A template
has a switch if both of its values are accepted and give different prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from chatcache.errors import InvalidRequestError
from chatcache.tokenizer.reply_format import ReplyFormat, decode_prompt_end
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.request import ThinkingMarks

KWARGS = "chat_template_kwargs"
EFFORT = "reasoning_effort"
SWITCHES = ("enable_thinking", "thinking")
KEEPS: Mapping[str, bool] = {"preserve_thinking": True, "clear_thinking": False}
"""Variables with which a template writes the reasoning of earlier replies."""
NONE = "none"
LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
_USER = {"role": "user", "content": "Hi"}
_THOUGHT, _ANSWER = "thoughtprobe", "answerprobe"
_UNKNOWN = "qzxeffort"  # a level that no template knows
Variables = Mapping[str, Any]
Message = Mapping[str, Any]


class ThinkingControls:
    """The controls of one model. Rendering happens at the first use of each."""

    def __init__(self, tokenizer: Tokenizer, reply_format: ReplyFormat) -> None:
        self._tokenizer = tokenizer
        self._syntax = reply_format.reasoning
        self._format = reply_format

    @property
    def can_reason(self) -> bool:
        """True if the replies may contain reasoning that the server recognises."""
        return self._syntax is not None

    @property
    def closing_marker(self) -> str:
        """The marker that ends the reasoning; "" for a model without."""
        return self._syntax.closing if self._syntax is not None else ""

    def begin_reply(self, content: str, reasoning: str, rendering: str) -> str:
        """Return the beginning of a reply to the prompt `rendering`.

        Its reasoning, if it has some or the prompt opens it, then `content`.
        """
        is_open = self._format.starts_in_reasoning(rendering)
        if self._syntax is None or not (reasoning or is_open):
            return content
        return f"{'' if is_open else self._syntax.opening}{reasoning}{self.closing_text}{content}"

    def check_kwargs(self, kwargs: Variables) -> None:
        """Check a client's template variables. Raises: InvalidRequestError naming the variable."""
        check_template_kwargs(kwargs, self._tokenizer.reserved_variables)
        if kwargs and self.render(kwargs) is None and self.render({}) is not None:
            raise InvalidRequestError("the chat template refuses these chat_template_kwargs", param=KWARGS)

    def reads(self, name: str) -> bool:
        """Return True if the template reads a variable of this name."""
        return name in self._tokenizer.template_variables

    @cached_property
    def on(self) -> Variables:
        """Variables that switch the reasoning on; empty if the template has no switch."""
        return dict.fromkeys(self._switches, True)

    @cached_property
    def off(self) -> Variables | None:
        """Variables with which the model does not reason, none for one that never does; None if there are none."""
        if self._switches:
            return dict.fromkeys(self._switches, False)
        special = self.render({EFFORT: NONE})
        if special is not None and self.reads(EFFORT):
            unknown = self.render({EFFORT: _UNKNOWN})
            if unknown is None or unknown.replace(_UNKNOWN, NONE) != special:
                return {EFFORT: NONE}  # the template does not just repeat the level
        return {} if self._syntax is None and not self.levels else None

    @cached_property
    def levels(self) -> tuple[str, ...]:
        """The levels of effort that change the prompt."""
        if not self.reads(EFFORT):
            return ()
        prompts = {level: self.render({EFFORT: level}) for level in LEVELS}
        if len({*prompts.values(), self.render({})}) == 1:
            return ()
        return tuple(level for level, prompt in prompts.items() if prompt is not None)

    def changes_prompt(self, variables: Variables) -> bool:
        """Return True if these variables change the prompt of a chat."""
        return self.render(variables) != self.render({})

    @cached_property
    def keeps(self) -> Variables:
        """Variables with which the template writes the reasoning of earlier replies; empty if it has none."""
        return {name: value for name, value in KEEPS.items() if self.reads(name)}

    def nearest_level(self, level: str) -> str | None:
        """Return the level that the template accepts and that is nearest to `level`; None if it accepts none."""
        places = sorted(self.levels, key=lambda each: abs(LEVELS.index(each) - LEVELS.index(level)))
        return places[0] if places else None

    @cached_property
    def closing_text(self) -> str:
        """The text that ends the reasoning, with the white space that the template writes around it."""
        if self._syntax is None:
            return ""
        reply = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        for variables in ({}, self.on):
            text = self.render(variables, [_USER, reply], prompts=False) or ""
            between = text.partition(_THOUGHT)[2].partition(_ANSWER)[0]
            if between.strip() == self._syntax.closing:
                return between
        return self._syntax.closing

    @cached_property
    def _closing_ids(self) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_after("a", self.closing_text))

    def marks(self, prompt: Sequence[int], num_prefix_tokens: int = 0) -> ThinkingMarks | None:
        """Return how the model marks its reasoning in the reply to a prompt; None if that is not known.

        The last `num_prefix_tokens` of the prompt are the beginning of the reply.
        """
        if self._syntax is None:
            return None
        end = decode_prompt_end(self._tokenizer, prompt[: len(prompt) - num_prefix_tokens])
        return ThinkingMarks(
            opening=self._syntax.opening,
            closing=self._syntax.closing,
            closing_ids=self._closing_ids,
            is_open=self._format.starts_in_reasoning(end),
            num_prefix_tokens=num_prefix_tokens,
        )

    @cached_property
    def _switches(self) -> tuple[str, ...]:
        names = [name for name in SWITCHES if self.reads(name)]
        return tuple(name for name in names if self.render({name: True}) != self.render({name: False}))

    def render(
        self, variables: Variables, messages: Sequence[Message] = (_USER,), *, prompts: bool = True
    ) -> str | None:
        """Render a probe chat; None if the template refuses it."""
        try:
            return self._tokenizer.render(messages, prompts, **variables)
        except InvalidRequestError:
            return None


MAX_KWARGS = 32
MAX_KWARG_NAME_CHARS = 64
MAX_KWARG_DEPTH = 4
MAX_KWARGS_CHARS = 4096
_RESERVED = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)


def check_template_kwargs(kwargs: Variables, reserved: Collection[str], param: str = KWARGS) -> None:
    """Check names, depth and size of a client's template variables.

    `reserved`: names in addition to those of the chat itself. Raises: InvalidRequestError naming the variable.
    """
    if not isinstance(kwargs, Mapping):
        raise InvalidRequestError(f"{param} must be a dict, got {type(kwargs).__name__}", param=param)
    if len(kwargs) > MAX_KWARGS:
        raise InvalidRequestError(f"{param} must have at most {MAX_KWARGS} entries, got {len(kwargs)}", param=param)
    num_chars = 0
    for name, value in kwargs.items():
        if not isinstance(name, str):
            raise InvalidRequestError(f"{param}: names of variables must be text, got {name!r:.64}", param=param)
        where = f"{param}.{name[:MAX_KWARG_NAME_CHARS]}"
        if not name.isidentifier() or not name.isascii() or name.startswith("_") or len(name) > MAX_KWARG_NAME_CHARS:
            raise InvalidRequestError(f"{where}: not a name of a template variable", param=where)
        if name in _RESERVED or name in reserved:
            raise InvalidRequestError(f"{where} is set by the server and cannot be replaced", param=where)
        num_chars += len(name) + _num_chars(value, MAX_KWARG_DEPTH, where)
    if num_chars > MAX_KWARGS_CHARS:
        raise InvalidRequestError(f"{param} must have at most {MAX_KWARGS_CHARS} characters in all", param=param)


def _num_chars(value: object, depth: int, where: str) -> int:
    """Return the size of a JSON value. Raises: InvalidRequestError for one that is nested deeper than `depth`."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, dict | list):
        return len(str(value)) if isinstance(value, int) and value.bit_length() > 64 else 8
    if not depth:
        raise InvalidRequestError(f"{where} is nested more than {MAX_KWARG_DEPTH} levels deep", param=where)
    size = 0
    for each in value.items() if isinstance(value, dict) else value:
        parts = each if isinstance(value, dict) else (each,)
        size += sum(_num_chars(part, depth - 1, where) for part in parts) + 2
    return size
