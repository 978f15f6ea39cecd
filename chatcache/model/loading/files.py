"""Find a model folder and read its small files.

Every problem is raised as one ModelFolderError that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chatcache.errors import ChatcacheError, ModelFolderError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
POOLING_KINDS = {"mean": "mean", "mean_sqrt_len": "mean", "lasttoken": "last"}  # of sentence-transformers
PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
MAX_JSON_BYTES = 64 << 20
CONNECT_TIMEOUT_S = 5.0
MAX_LAYERS = 4096
MAX_POSITIONS = 1 << 24
MAX_DIMENSION = (1 << 31) - 1
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.npy", "*.npz")
_OTHER = ("*.gguf", "*.ggml", "*.onnx", "*.h5", "*.msgpack")
_GGUF = "GGUF is not supported, use the model's folder with config.json and safetensors weights"
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length", "seq_length")


def model_name(model: str) -> str:
    """Return the default name of a model: its Hugging Face id, or the name of its folder."""
    if not model:
        return "chatcache-builtin"
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def resolve_model_path(model: str) -> Path:
    """Return the folder of `model`: "" is the demo model, else a folder or a Hugging Face id.

    Ids are looked up in the local Hugging Face cache first and downloaded only if `HF_HUB_OFFLINE` allows it.
    Raises: ModelFolderError if there is neither such a folder nor such an id.
    """
    if not model:
        from chatcache.demo_model import model_path

        return Path(model_path())
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        hint = f"; {_GGUF}" if path.suffix.lower() == ".gguf" else ""
        raise ModelFolderError(f"{model}: is a file, not a model folder{hint}")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelFolderError(f"{model}: no such folder")
    return _fetch(model)


def _fetch(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(PATTERNS), etag_timeout=CONNECT_TIMEOUT_S))
    except Exception as error:  # huggingface_hub raises many types
        raise ModelFolderError(f"{model}: no such folder, and {_fetch_error(error)}") from error


def _fetch_error(error: Exception) -> str:
    """Return why a Hugging Face id could not be fetched, and how to fix it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return (
            "it is not in the Hugging Face cache, where HF_HUB_OFFLINE confines the search; unset HF_HUB_OFFLINE, "
            "or give the folder of a model that was downloaded elsewhere"
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, LocalEntryNotFoundError):
        return (
            f"{constants.ENDPOINT} cannot be reached ({reason.removeprefix('Got: ')}); download the model on another "
            "machine and give its folder, or set HF_ENDPOINT to a mirror"
        )
    if isinstance(error, RepositoryNotFoundError):  # 404, and 401 without a token
        return f"{constants.ENDPOINT} has no such model, or shows it with a token only: set HF_TOKEN"
    return f"it could not be fetched from {constants.ENDPOINT}: {reason}"


@contextmanager
def as_model_folder_error(path: Path) -> Iterator[None]:
    """Convert unexpected exceptions of the `with` block to a ModelFolderError that names `path`."""
    try:
        yield
    except (ChatcacheError, ConnectionError):  # ConnectionError: raised by the receiver of the progress
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
        raise ModelFolderError(f"{path}: cannot be loaded: {reason}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises: ModelFolderError if the file is missing, unreadable or not a JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelFolderError(f"{path}: is larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFolderError(f"{path}: missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # ValueError: also a number with thousands of digits
        raise ModelFolderError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Return `config.json`. Raises: ModelFolderError, also if the folder is missing."""
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: no such folder")
    check_links(folder)
    if not (folder / "config.json").exists() and (files := sorted(path.name for path in folder.glob("*.gguf"))):
        raise ModelFolderError(f"{folder}: has {files[0]} but no config.json; {_GGUF}")
    config = read_json(folder / "config.json")
    _check_sizes(folder / "config.json", config)
    return config


def read_pooling(folder: Path) -> str | None:
    """Return the kind of pooling that a sentence-transformers folder declares: last | mean; None without a declaration.

    Raises: ModelFolderError for another kind, and for a projection after the pooling.
    """
    for path in folder.glob("[0-9]_Dense*/config.json"):
        problem = "a projection after the pooling is not supported; choose --pooling last or mean to leave it out"
        raise ModelFolderError(f"{path}: {problem}")
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return None
    config = read_json(path)
    prefix = "pooling_mode_"
    names = [name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value is True]
    kinds = [name.removesuffix("_tokens") for name in names]
    mode = config.get("pooling_mode", kinds)
    kinds = [mode] if isinstance(mode, str) else list(mode)
    pooling = POOLING_KINDS.get(kinds[0]) if len(kinds) == 1 else None
    if pooling is None:
        found = " and ".join(map(str, kinds)) or "of no kind"
        raise ModelFolderError(f"{path}: pooling {found} is not supported; choose --pooling last or mean")
    return pooling


def check_links(folder: Path) -> None:
    """Verify that no file of a model is a symbolic link out of the folder.

    Links into the blobs of the Hugging Face cache are allowed. Raises: ModelFolderError naming the file.
    """
    resolved = folder.resolve()
    allowed_folders = [resolved]
    if resolved.parent.name == "snapshots":  # Hugging Face cache: files are links to blobs
        allowed_folders.append(resolved.parent.parent / "blobs")
    patterns = (*PATTERNS, "1_Pooling/*.json")
    for file in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        if not file.is_symlink():
            continue
        try:
            target = file.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise ModelFolderError(f"{file}: is a link that leads nowhere") from error
        if not any(target.is_relative_to(each) for each in allowed_folders):
            raise ModelFolderError(f"{file}: is a link to {target}, outside the folder; put the file itself there")


def _check_sizes(where: Path, config: dict[str, Any]) -> None:
    """Reject implausibly large numbers before anything is allocated from them."""
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, dict) else {}):
        for name, value in fields.items():
            max_value = _max_value(name)
            if (
                max_value is None
                or isinstance(value, bool)
                or not isinstance(value, int)
                or -max_value <= value <= max_value
            ):
                continue
            shown = value if value.bit_length() < 128 else "a far larger number"
            raise ModelFolderError(f"{where}: {name} is {shown}; at most {max_value} is sensible")


def _max_value(name: str) -> int | None:
    """Return the largest plausible value of a field of config.json, None if it is not a size."""
    if name in _LAYERS:
        return MAX_LAYERS
    if name in _POSITIONS:
        return MAX_POSITIONS
    return MAX_DIMENSION if name.endswith(("_size", "_dim")) or name.startswith(("num_", "n_")) else None


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of the model, sorted by name.

    Raises: ModelFolderError if there are none, a shard is missing, or the index points outside the folder.
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
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        return f"{folder}: has {pickled[0]} but no {WEIGHTS}; pickled weights are refused, convert them to safetensors"
    other = sorted(path.name for pattern in _OTHER for path in folder.glob(pattern))
    if other:
        return f"{folder}: has {other[0]} but no {WEIGHTS}; of weights only safetensors can be read"
    return f"{folder / WEIGHTS}: missing (and there is no {INDEX})"


def eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the end-of-turn ids from `generation_config.json`, else from `config.json` or its `text_config`."""
    path = folder / "generation_config.json"
    text = config.get("text_config")
    configs = (read_json(path) if path.is_file() else {}, config, text if isinstance(text, dict) else {})
    found = next((each["eos_token_id"] for each in configs if each.get("eos_token_id") is not None), None)
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(id, int) and not isinstance(id, bool) and id >= 0 for id in ids):
        raise ModelFolderError(f"{path if path.is_file() else folder / 'config.json'}: eos_token_id is {found!r}")
    return tuple(ids)
