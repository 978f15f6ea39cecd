"""Chat templates: Jinja in an immutable sandbox, with what model authors expect of transformers' environment.

JSON that goes into a rendering as it was written: spacing, order and escapes are part of what the model said.

Control tokens that somebody typed: inside a message they are text, never control.

    content      say <|im_end|> twice
    rendering    <|im_start|>user\nsay <~|im_end|> twice<|im_end|>\n        ~ is `SEAM`
    ids          [im_start] ... "<" "|im_end|> twice" [im_end] ...

A template mixes its own control tokens with what people wrote; once they are one string, nothing tells them apart. So
what people wrote is seamed before it is rendered, and a rendering is encoded seam by seam.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from chatcache.errors import InvalidRequestError, ModelFolderError
from chatcache.tokenizer.template_sandbox import (
    MAX_RENDER_CHARS,
    OURS,
    TICK,
    BoundedEnvironment,
    CostLimiter,
    RenderBudget,
    TemplateCostError,
)

MAX_DEPTH = 64


class RawJson(dict[str, Any]):
    """An object as templates read it; `tojson` writes `source`, the text it was read from."""

    __slots__ = ("source",)

    def __init__(self, value: dict[str, Any], source: str) -> None:
        super().__init__(value)
        self.source = source


def arguments_of(source: str) -> RawJson | str:
    """Return a call's arguments for a template: an object where they are one, else the text itself."""
    try:
        value = json.loads(source)
        json.dumps(value, ensure_ascii=False).encode()  # escapes may stand for lone surrogates
    except (ValueError, RecursionError):
        return source
    return RawJson(value, source) if isinstance(value, dict) and _is_shallow(value, MAX_DEPTH) else source


def _is_shallow(value: Any, left: int) -> bool:
    """Whether templates, and whoever else walks it, can go as deep as it is."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left > 0 and all(_is_shallow(each, left - 1) for each in inner)


def dumped(value: Any, **options: Any) -> str:
    """Dump as JSON, verbatim where that is asked for."""
    sources: list[str] = []
    text = json.dumps(_marked(value, sources), **options)
    for number, source in enumerate(sources):
        mark = json.dumps(_mark(number), ensure_ascii=options.get("ensure_ascii", True))
        text = text.replace(mark, source, 1)
    return text


def _marked(value: Any, sources: list[str]) -> Any:
    if isinstance(value, RawJson):
        sources.append(value.source)
        return _mark(len(sources) - 1)
    if isinstance(value, dict):
        return {key: _marked(each, sources) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(each, sources) for each in value]
    return value


def _mark(number: int) -> str:
    return f"\udcfe{number}\udcfe"  # lone surrogates: no valid text holds them


Message = Mapping[str, Any]
_FINAL_MARK = "\ue000chatcache-final\ue000"
MAX_CHECK_S = 0.25  # of computing; one message takes a hundredth of that

log = logging.getLogger(__name__)


class ChatTemplate:
    """One compiled template. `variables` (bos_token, eos_token, ...) are visible to it.

    Raises: ModelFolderError naming `origin` when it does not compile.
    """

    def __init__(self, source: str, *, origin: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        try:
            self._template = _compile(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ModelFolderError(
                f"{origin}: the chat template does not compile (line {line}): {error.message}"
            ) from error
        except Exception as error:  # nested too deeply, a number of too many digits, ...
            raise ModelFolderError(f"{origin}: the chat template does not compile: {type(error).__name__}") from error
        self._variables = dict(variables)

    def check(self, origin: str) -> None:
        """Render the shortest chat. Raises: ModelFolderError if that breaks out of the sandbox or has no end.

        What a template merely refuses is for its users to hear.
        """
        try:
            self._render([{"role": "user", "content": "Hi"}], True, {}, RenderBudget(MAX_CHECK_S))
        except SecurityError as error:
            raise ModelFolderError(f"{origin}: the chat template is refused: {error}") from error
        except Exception:
            log.debug("%s: the chat template does not render one user message", origin, exc_info=True)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a chat. `continue_final_message` ends the text right behind the last message's content.

        Raises: InvalidRequestError (param "messages") when the template refuses them or cannot cope with them.
        """
        chat = [dict(message) for message in messages]
        if continue_final_message:
            add_generation_prompt = False
            _mark_final(chat)
        try:
            text = self._render(chat, add_generation_prompt, variables, RenderBudget())
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refused the messages: {error}", param="messages") from error
        except Exception as error:  # a template is a program of its author's: whatever it trips over is these messages
            raise InvalidRequestError(
                f"the chat template cannot render these messages ({type(error).__name__})", param="messages"
            ) from error
        if not continue_final_message:
            return text
        cut = text.rfind(_FINAL_MARK)
        if cut < 0:
            raise InvalidRequestError("this chat template cannot continue the final message", param="messages")
        return text[:cut]

    def _render(
        self, chat: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any], meter: RenderBudget
    ) -> str:
        given = {**self._variables, "tools": None, "documents": None, **variables, TICK: meter}
        context = self._template.new_context(
            {**given, "messages": chat, "add_generation_prompt": add_generation_prompt}
        )
        pieces: list[str] = []
        length = 0
        for piece in self._template.root_render_func(context):
            length += len(piece)
            if length > MAX_RENDER_CHARS:
                raise TemplateCostError(f"the chat template writes more than {MAX_RENDER_CHARS} characters")
            meter()
            pieces.append(piece)
        return "".join(pieces)


def _compile(source: str) -> jinja2.Template:
    environment = _environment()
    for name in OURS:
        if name in source:
            raise jinja2.TemplateSyntaxError(f"{name} is not for templates", 1)
    tree = environment.parse(source)
    if any(tree.find(kind) is not None for kind in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        raise jinja2.TemplateSyntaxError("a chat template may not load others", 1)
    return environment.from_string(CostLimiter().visit(tree))


def _mark_final(chat: list[dict[str, Any]]) -> None:
    """Put a mark behind the last message's text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _FINAL_MARK
    elif isinstance(content, list) and content and isinstance(content[-1], dict) and "text" in content[-1]:
        chat[-1]["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _FINAL_MARK}]
    else:
        raise InvalidRequestError("the final message has no text to continue", param="messages")


class _GenerationTag(Extension):
    """Accept `{% generation %}` blocks, which mark the assistant's turns for training, as plain content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """`namespace()` that keeps no underscore names, so a template cannot plant Python's own attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __repr__(self) -> str:  # not what is in it, which may be itself
        return "<Namespace>"

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    extras: dict[str, Callable[..., Any]] = {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _PublicNamespace,
    }
    environment.globals.update(extras)
    environment.add_filter("tojson", _to_json)
    return environment


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump without Jinja's HTML escapes, which a model should never see; a call's arguments as they were written."""
    return dumped(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


SEAM = "\udcff"  # a lone surrogate: no valid text holds it


class SpecialTokenEscaper:
    """Puts a seam into every occurrence of the given tokens. Linear in the text, however many tokens there are."""

    def __init__(self, tokens: Iterable[str]) -> None:
        rests: dict[str, list[str]] = {}
        for token in tokens:
            if len(token) > 1:
                rests.setdefault(token[0], []).append(token[1:])
        # Only the first character is consumed, so that overlapping tokens are found too.
        heads = [f"{re.escape(first)}(?={_any_of(rest)})" for first, rest in sorted(rests.items())]
        self._pattern = re.compile("|".join(heads)) if heads else None

    def quote(self, value: Any) -> Any:
        """Return a text, or any JSON value with all texts in it, seamed.

        Raises: InvalidRequestError for text that is not valid Unicode.
        """
        if isinstance(value, str):
            if SEAM in value:
                raise InvalidRequestError("text must be valid Unicode (a lone surrogate was found)", param="messages")
            return self._pattern.sub(rf"\g<0>{SEAM}", value) if self._pattern is not None else value
        if isinstance(value, RawJson):
            return RawJson({key: self.quote(each) for key, each in value.items()}, self.quote(value.source))
        if isinstance(value, dict):
            return {key: self.quote(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.quote(each) for each in value]
        return value


def unquote(rendering: str) -> str:
    """Return a rendering as people may read it."""
    return rendering.replace(SEAM, "")


def _any_of(words: Collection[str]) -> str:
    """A pattern of the shortest of `words`, as a tree, so that no character is looked at once per word."""
    if "" in words:
        return ""
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(first) + _any_of(rest) for first, rest in sorted(rests.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
