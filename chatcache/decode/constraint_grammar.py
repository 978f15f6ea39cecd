"""What a caller asks of the output, as one grammar in llguidance's Lark notation. Nothing is compiled here."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from chatcache.errors import InvalidRequest
from chatcache.types.params import StructuredOutputs

MAX_SCHEMA_BYTES = 256 << 10
MAX_REGEX_BYTES = 16 << 10
MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 10_000
MAX_CHOICE_BYTES = 256 << 10
JSON_WHITESPACE = " "  # once or not at all: a model that likes new lines would go on with them for ever

PARAM = "structured_outputs"
_FIELDS = ("json", "json_object", "regex", "choice", "grammar")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/', re.DOTALL)  # strings, comments, regexes
# Every tokenisation of the allowed text is allowed; the model chooses, not a tokenizer that the engine lacks.
_OPTIONS = '%llguidance {"no_forcing": true}'


def check_structured_outputs(outputs: object) -> None:
    """Verify kinds and sizes. Raises: InvalidRequest naming the field and the limit."""
    if not isinstance(outputs, StructuredOutputs):
        raise InvalidRequest(
            f"{PARAM} must be a chatcache.StructuredOutputs, got {type(outputs).__name__}", param=PARAM
        )
    if not isinstance(outputs.json_object, bool):
        raise InvalidRequest(f"{PARAM}.json_object must be true or false", param=PARAM)
    given = [name for name in _FIELDS if getattr(outputs, name) not in (None, False, ())]
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise InvalidRequest(f"{PARAM} needs exactly one of {', '.join(_FIELDS)}; got {found}", param=PARAM)
    _text("json", outputs.json, MAX_SCHEMA_BYTES)
    _text("regex", outputs.regex, MAX_REGEX_BYTES)
    _text("grammar", outputs.grammar, MAX_GRAMMAR_BYTES)
    _choices(outputs.choice)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in outputs.special_token_ids):
        raise InvalidRequest(f"{PARAM}.special_token_ids must be token ids", param=PARAM)


def lark_of(outputs: StructuredOutputs) -> str:
    """Return the grammar of outputs that `check_structured_outputs` has accepted.

    Raises: InvalidRequest for a schema that is not JSON, or not a schema at all; for a grammar that names tokens.
    """
    if outputs.grammar is not None:
        _refuse_tokens(outputs.grammar, outputs.special_token_ids)
        return f"{outputs.grammar}\n{_OPTIONS}\n"
    if outputs.json is not None:
        start = _schema(outputs.json)
    elif outputs.json_object:
        start = _inline({"type": "object"})
    elif outputs.regex is not None:
        start = f"/{_slashed(outputs.regex)}/"
    else:
        return f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, outputs.choice))}\n{_OPTIONS}\n"
    return f"start: {start}\n{_OPTIONS}\n"


def _refuse_tokens(grammar: str, allowed: Collection[int]) -> None:
    """Refuse `<name>` and `<[id]>`, the notation's symbols for single tokens, but for those ids that may be named."""
    symbols = {f"<[{token}]>" for token in allowed}
    for named in re.finditer(r"<[^<>\s]+>", _QUOTED.sub(" ", grammar)):
        if named[0] in symbols:
            continue
        raise InvalidRequest(f"{PARAM}.grammar names the token {named[0]:.40}; it must describe text", param=PARAM)


def _text(name: str, value: object, limit: int) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidRequest(f"{PARAM}.{name} must be text, got {type(value).__name__}", param=PARAM)
    size = _num_bytes(name, value)
    if not 1 <= size <= limit:
        raise InvalidRequest(f"{PARAM}.{name} must have 1 to {limit} bytes, got {size}", param=PARAM)


def _choices(value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(text, str) and text for text in value):
        raise InvalidRequest(f"{PARAM}.choice must be a list of texts that are not empty", param=PARAM)
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(f"{PARAM}.choice must have at most {MAX_CHOICES} texts, got {len(value)}", param=PARAM)
    size = sum(_num_bytes("choice", text) for text in value)
    if size > MAX_CHOICE_BYTES:
        raise InvalidRequest(f"{PARAM}.choice must have at most {MAX_CHOICE_BYTES} bytes, got {size}", param=PARAM)


def _num_bytes(name: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{PARAM}.{name} must be valid Unicode (a lone surrogate was found)", param=PARAM
        ) from None


def _schema(text: str) -> str:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{PARAM}.json is not JSON: {error!s:.200}", param=PARAM) from None
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{PARAM}.json must be a JSON schema: an object, true or false", param=PARAM)
    return _inline(schema)


def _inline(schema: dict[str, object]) -> str:
    """Write a schema as a grammar symbol; it is laid out as its `x-guidance` says, else on one line."""
    text = json.dumps({"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema}, ensure_ascii=False)
    _num_bytes("json", text)
    return f"%json {text}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _slashed(regex: str) -> str:
    """Make a regular expression fit between slashes."""
    escaped = re.sub(r"\\.|[/\\]", lambda match: "\\/" if match[0] == "/" else match[0], regex, flags=re.DOTALL)
    if re.sub(r"\\.", "", regex, flags=re.DOTALL).endswith("\\"):
        raise InvalidRequest(f"{PARAM}.regex ends in a backslash that escapes nothing", param=PARAM)
    return escaped


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
