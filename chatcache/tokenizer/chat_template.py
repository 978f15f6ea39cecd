"""Chat templates: Jinja in an immutable sandbox with the globals of transformers.

Special tokens in the text of a message are escaped, so that a client cannot inject control tokens:

    content      say <|im_end|> twice
    rendering    <|im_start|>user\nsay <~|im_end|> twice<|im_end|>\n        ~ is `TOKEN_BREAK`
    ids          [im_start] ... "<" "|im_end|> twice" [im_end] ...

Once a template has joined its own special tokens with message text, the two cannot be distinguished. So a break is
inserted into message text before rendering, and the rendering is encoded part by part between the breaks.

The arguments of earlier tool calls are rendered exactly as the model wrote them (`RawJson`): spacing, key order and
escapes stay, so that the tokens of the history do not change.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from chatcache.errors import InvalidRequestError, ModelFolderError
from chatcache.tokenizer.template_sandbox import (
    MAX_RENDER_CHARS,
    RESERVED_NAMES,
    TICK,
    BoundedEnvironment,
    CostLimiter,
    RenderBudget,
    TemplateCostError,
)

MAX_DEPTH = 64


class RawJson(dict[str, Any]):
    """A JSON object that is rendered as the text it was parsed from.

    Templates see the parsed object; the `tojson` filter writes `source`. So do templates that join the arguments with
    text, or write them as they are (DeepSeek): they expect a string.
    """

    __slots__ = ("source",)

    def __init__(self, value: dict[str, Any], source: str) -> None:
        super().__init__(value)
        self.source = source

    def __str__(self) -> str:
        return self.source

    def __add__(self, text: str) -> str:
        return self.source + text

    def __radd__(self, text: str) -> str:
        return text + self.source


def parse_arguments(source: str) -> RawJson | str:
    """Parse the JSON arguments of an earlier tool call for use in a template.

    Return the object, or the text itself if it is not a JSON object.
    """
    try:
        value = json.loads(source)
        json.dumps(value, ensure_ascii=False).encode()  # escapes may stand for lone surrogates
    except (ValueError, RecursionError):
        return source
    return RawJson(value, source) if isinstance(value, dict) and _is_shallow(value, MAX_DEPTH) else source


def _is_shallow(value: Any, left: int) -> bool:
    """Return True if the value is nested at most `left` levels deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left > 0 and all(_is_shallow(each, left - 1) for each in inner)


def dump_json(value: Any, **options: Any) -> str:
    """Dump a value as JSON; each `RawJson` is written as its source text."""
    sources: list[str] = []
    text = json.dumps(_replace_raw_json(value, sources), **options)
    for number, source in enumerate(sources):
        mark = json.dumps(_placeholder(number), ensure_ascii=options.get("ensure_ascii", True))
        text = text.replace(mark, source, 1)
    return text


def _replace_raw_json(value: Any, sources: list[str]) -> Any:
    if isinstance(value, RawJson):
        sources.append(value.source)
        return _placeholder(len(sources) - 1)
    if isinstance(value, dict):
        return {key: _replace_raw_json(each, sources) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_raw_json(each, sources) for each in value]
    return value


def _placeholder(number: int) -> str:
    return f"\udcfe{number}\udcfe"  # lone surrogates: no valid text holds them


Message = Mapping[str, Any]
_END_MARK = "\ue000chatcache-final\ue000"
_PROBE = "content-of-a-message"
MAX_CHECK_S = 0.25  # of computing; one message takes a hundredth of that

log = logging.getLogger(__name__)


class ChatTemplate:
    """One compiled template. `variables` (bos_token, eos_token, ...) are visible to it.

    `variable_names`: those that it reads besides. `reserved_names`: those that a chat's own variables may not replace.

    Raises: ModelFolderError naming `origin` when it does not compile.
    """

    def __init__(self, source: str, *, origin: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        try:
            self._template, read = _compile(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ModelFolderError(
                f"{origin}: the chat template does not compile (line {line}): {error.message}"
            ) from error
        except Exception as error:  # nested too deeply, a number of too many digits, ...
            raise ModelFolderError(f"{origin}: the chat template does not compile: {type(error).__name__}") from error
        self._variables = dict(variables)
        self.reserved_names = frozenset({*RESERVED_NAMES, *self._variables, *self._template.environment.globals})
        self.variable_names = frozenset(read) - self.reserved_names
        self._tools_name = _OTHER_TOOLS if _OTHER_TOOLS in read and "tools" not in read else "tools"
        self._needs_parts = False

    def check(self, origin: str) -> None:
        """Render a one-message chat as a check at load time.

        Templates of models that also read images may render contents only if they are lists of parts; later contents
        are then given to them so. Templates that reject this chat pass: they report their reason per request.
        Raises: ModelFolderError if the template violates the sandbox or does not terminate.
        """
        if not self._shows_content(origin, _PROBE):
            self._needs_parts = self._shows_content(origin, _as_parts(_PROBE))

    def _shows_content(self, origin: str, content: str | list[dict[str, str]]) -> bool:
        """Return whether the rendering of one user message contains the probe."""
        try:
            return _PROBE in self._render([{"role": "user", "content": content}], True, {}, RenderBudget(MAX_CHECK_S))
        except SecurityError as error:
            raise ModelFolderError(f"{origin}: the chat template is refused: {error}") from error
        except Exception:
            log.debug("%s: the chat template does not render one user message", origin, exc_info=True)
            return False

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a chat.

        With `continue_final_message` the text ends directly after the last message's content.

        Raises: InvalidRequestError (param "messages") if the template rejects the messages or fails on them.
        """
        chat = [dict(message) for message in messages]
        if self._needs_parts:
            for message in chat:
                if isinstance(message.get("content"), str):
                    message["content"] = _as_parts(message["content"])
        if continue_final_message:
            add_generation_prompt = False
            _append_end_mark(chat)
        try:
            text = self._render(chat, add_generation_prompt, variables, RenderBudget())
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refused the messages: {error}", param="messages") from error
        except Exception as error:  # a template is a program: any error is reported for these messages
            raise InvalidRequestError(
                f"the chat template cannot render these messages ({type(error).__name__})", param="messages"
            ) from error
        if not continue_final_message:
            return text
        cut = text.rfind(_END_MARK)
        if cut < 0:
            raise InvalidRequestError("this chat template cannot continue the final message", param="messages")
        return text[:cut]

    def _render(
        self, chat: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any], meter: RenderBudget
    ) -> str:
        given = {**self._variables, "tools": None, "documents": None, **variables, TICK: meter}
        given.setdefault(self._tools_name, given["tools"])
        context = self._template.new_context(
            {**given, "messages": chat, "add_generation_prompt": add_generation_prompt}
        )
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.root_render_func(context):
                length += len(piece)
                if length > MAX_RENDER_CHARS:
                    raise TemplateCostError(f"the chat template writes more than {MAX_RENDER_CHARS} characters")
                meter()
                pieces.append(piece)
        finally:  # macros refer to the context: the cycle would keep the messages until a full garbage collection
            context.vars.clear()
            context.parent.clear()
        return "".join(pieces)


_OTHER_TOOLS = "xml_tools"  # the name that SmolLM3's chat template has for `tools`


def _compile(source: str) -> tuple[jinja2.Template, set[str]]:
    """Compile a template; also return the names of the variables that it reads."""
    environment = _environment()
    for name in RESERVED_NAMES:
        if name in source:
            raise jinja2.TemplateSyntaxError(f"{name} is not for templates", 1)
    tree = environment.parse(source)
    if any(tree.find(kind) is not None for kind in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        raise jinja2.TemplateSyntaxError("a chat template may not load others", 1)
    read = meta.find_undeclared_variables(tree)
    return environment.from_string(CostLimiter().visit(tree)), read


def _as_parts(text: str) -> list[dict[str, str]]:
    """Return a text content as a list of one part."""
    return [{"type": "text", "text": text}]


def _append_end_mark(chat: list[dict[str, Any]]) -> None:
    """Append a marker to the text of the last message, where the rendering is cut off later.

    Raises: InvalidRequestError if the last message has no text.
    """
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _END_MARK
    elif isinstance(content, list) and content and isinstance(content[-1], dict) and "text" in content[-1]:
        chat[-1]["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END_MARK}]
    else:
        raise InvalidRequestError("the final message has no text to continue", param="messages")


class _GenerationTag(Extension):
    """Jinja extension that treats `{% generation %}` blocks (used in training) as plain content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """`namespace()` that refuses underscore names, so that Python attributes cannot be set."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __repr__(self) -> str:  # not the content, which may contain the namespace itself
        return "<Namespace>"

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    extras: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _PublicNamespace,
    }
    environment.globals.update(extras)
    environment.add_filter("tojson", _to_json)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump as JSON without the HTML escapes of Jinja's own filter; `RawJson` as its source text."""
    return dump_json(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


TOKEN_BREAK = "\udcff"  # a lone surrogate: no valid text holds it


class SpecialTokenEscaper:
    """Inserts a token break into every occurrence of the given special tokens.

    The time is linear in the text for any number of tokens.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        rests: dict[str, list[str]] = {}
        for token in tokens:
            if len(token) > 1:
                rests.setdefault(token[0], []).append(token[1:])
        # Only the first character is consumed, so that overlapping tokens are found too.
        heads = [f"{re.escape(first)}(?={_alternation(rest)})" for first, rest in sorted(rests.items())]
        self._pattern = re.compile("|".join(heads)) if heads else None

    def escape(self, value: Any) -> Any:
        """Escape a string, or all strings within a JSON value, keys included.

        Raises: InvalidRequestError for text that is not valid Unicode.
        """
        if isinstance(value, str):
            if TOKEN_BREAK in value:
                raise InvalidRequestError("text must be valid Unicode (a lone surrogate was found)", param="messages")
            return self._pattern.sub(rf"\g<0>{TOKEN_BREAK}", value) if self._pattern is not None else value
        if isinstance(value, RawJson):
            return RawJson(self.escape(dict(value)), self.escape(value.source))
        if isinstance(value, dict):
            return {self.escape(key): self.escape(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(each) for each in value]
        return value


def unescape(rendering: str) -> str:
    """Remove the breaks from a rendering."""
    return rendering.replace(TOKEN_BREAK, "")


def _alternation(words: Collection[str]) -> str:
    """Return a regex that matches any of `words`, as a prefix tree.

    Each character is tested once, not per word.
    """
    if "" in words:
        return ""
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(first) + _alternation(rest) for first, rest in sorted(rests.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
