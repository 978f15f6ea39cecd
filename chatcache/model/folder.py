"""Find the model folder and read its small files; whatever is wrong with them ends as one sentence naming the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chatcache.errors import ModelFolderError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def model_name(model: str) -> str:
    """Return what to call a model that was given no name: its Hugging Face id, or its folder's name."""
    if not model:
        return "chatcache-builtin"
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def resolve_model_path(model: str) -> Path:
    """Return the folder of `model`: "" is the built-in model, else a folder, else a Hugging Face id.

    Ids are looked up in the local Hugging Face cache first and downloaded only if `HF_HUB_OFFLINE` allows it.
    Raises: ModelFolderError when there is no such folder and no such id.
    """
    if not model:
        from chatcache.builtin import model_path

        return Path(model_path())
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelFolderError(f"{model}: is a file, not a model folder")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelFolderError(f"{model}: no such folder")
    return _fetch(model)


def _fetch(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(PATTERNS)))
    except Exception as error:  # the hub raises many kinds; all mean the same to the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelFolderError(
            f"{model}: no such folder, and it could not be fetched as a Hugging Face id: {reason}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises: ModelFolderError if it is absent, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFolderError(f"{path}: missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{path}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ModelFolderError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Return `config.json`. Raises: ModelFolderError, also when the folder itself is absent."""
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: no such folder")
    return read_json(folder / "config.json")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of the model, sorted by name.

    Raises: ModelFolderError when there are none, a shard is missing, or the index points outside the folder.
    """
    index = folder / INDEX
    if (folder / WEIGHTS).is_file():
        return (folder / WEIGHTS,)
    if not index.is_file():
        raise ModelFolderError(_no_weights(folder))
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise ModelFolderError(f"{index}: weight_map must map tensor names to file names")
    for name in sorted(set(shards.values())):
        if Path(name).name != name or name in ("", ".", ".."):
            raise ModelFolderError(f"{index}: weight_map points outside the folder: {name!r}")
        if not (folder / name).is_file():
            raise ModelFolderError(f"{folder / name}: missing, but {INDEX} names it")
    return tuple(folder / name for name in sorted(set(shards.values())))


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        return f"{folder}: has {pickled[0]} but no {WEIGHTS}; pickled weights are refused, convert them to safetensors"
    return f"{folder / WEIGHTS}: missing (and there is no {INDEX})"


def eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the end-of-turn ids: `generation_config.json` decides, else `config.json`."""
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = config.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(id, int) and not isinstance(id, bool) and id >= 0 for id in ids):
        raise ModelFolderError(f"{path if path.is_file() else folder / 'config.json'}: eos_token_id is {found!r}")
    return tuple(ids)
