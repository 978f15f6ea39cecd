"""The tokenizer of a model folder. No code of the folder's is run but its sandboxed template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from chatcache.errors import ModelFolderError
from chatcache.text.template import ChatTemplate
from chatcache.text.tokenizer import Tokenizer, is_panic

_PROBES = ("a" * 64 + "!", "A" * 64 + "\n", " " * 64 + "x", "0" * 64 + ".", "é" * 32 + "😀", "a b" * 32 + "\x00")
_OLDER_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "vocab.txt", "sentencepiece.bpe.model")


def read_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a model folder. Raises: ModelFolderError naming the file and the reason."""
    folder = Path(path)
    config = _read_json(folder / "tokenizer_config.json")
    named = {**_special_tokens(_read_json(folder / "special_tokens_map.json")), **_special_tokens(config)}
    backend = _load_backend(folder)
    _mark_special(backend, named.values())
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return Tokenizer(backend, eos_token_ids=_eos_ids(folder, eos), template=_load_template(folder, config, named))


def _load_backend(folder: Path) -> Backend:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = Backend.from_file(str(file))
            for text in _PROBES:  # a pattern that gives up, gives up at something like this
                backend.encode(text)
        except BaseException as error:  # the library raises bare Exception, and panics
            if not is_panic(error):
                raise
            raise ModelFolderError(f"{file}: not a tokenizer file: {_first_line(error)}") from error
        return backend
    if not any((folder / name).is_file() for name in _OLDER_FILES):
        raise ModelFolderError(f"{file}: missing; the folder has no tokenizer")
    return _convert_backend(folder)


def _mark_special(backend: Backend, tokens: Iterable[str]) -> None:
    """Make the named tokens special, as transformers does, where the tokenizer has them but not as special."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [token for token in tokens if token not in special and backend.token_to_id(token) is not None]
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _convert_backend(folder: Path) -> Backend:
    """Let transformers convert an older tokenizer format. Slow to import, hence only where it is needed."""
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        backend: Backend = converted.backend_tokenizer
    except Exception as error:
        raise ModelFolderError(
            f"{folder}: no tokenizer.json, and its older files do not convert: {_first_line(error)}"
        ) from error
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} where there is none. Raises: ModelFolderError for anything else in it."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise ModelFolderError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{file}: must hold a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the named tokens (`eos_token` ...) of a tokenizer config: each a string, or an object with `content`."""
    named: dict[str, str] = {}
    extra = config.get("extra_special_tokens")
    for key, value in {**config, **(extra if isinstance(extra, dict) else {})}.items():
        if isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            named[key] = value
    return named


def _eos_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Collect the EOS ids: of generation_config.json, else config.json; and the tokenizer's own."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        value = config.get("eos_token_id")
        if value is None and isinstance(config.get("text_config"), dict):
            value = config["text_config"].get("eos_token_id")
        if value is not None:
            found = list(value) if isinstance(value, list) else [value]
            break
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in found):
        raise ModelFolderError(f"{folder / name}: eos_token_id must be a token id or a list of them")
    if tokenizer_eos is not None:
        found.append(tokenizer_eos)
    return tuple(dict.fromkeys(found))


def _load_template(folder: Path, config: dict[str, Any], variables: dict[str, str]) -> ChatTemplate | None:
    """Find the chat template: its own file, else tokenizer_config.json (one, or the list's "default")."""
    file = folder / "chat_template.jinja"
    source: object = None
    if file.is_file():
        try:
            source = file.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ModelFolderError(f"{file}: not readable: {error}") from error
    else:
        file, source = folder / "tokenizer_config.json", config.get("chat_template")
    if source is None:
        file = folder / "chat_template.json"
        source = _read_json(file).get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelFolderError(f"{file}: chat_template must be text")
    template = ChatTemplate(source, origin=str(file), variables=variables)
    template.check(str(file))
    return template
