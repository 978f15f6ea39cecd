"""Where an engine is put together: model, tokenizer and scheduler meet here and nowhere else.

The CLI, `LLM`, the bench and the engine child (which imports it by the name `BUILD_ENGINE`) share it. Everything heavy
is imported inside the functions, so that naming this module costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from chatcache.config import EngineConfig

if TYPE_CHECKING:
    from chatcache.engine.engine import Engine
    from chatcache.model.runner import Runner
    from chatcache.tokenizer.tokenizer import Tokenizer

BUILD_ENGINE = "chatcache.factory:build_engine"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")

Progress = Callable[[float, str], None]


def build_engine(config: EngineConfig, progress: Progress | None = None, *, need_tokenizer: bool = True) -> Engine:
    """Load the model into an engine. `progress` hears a fraction 0..1 and what is being done.

    Without `need_tokenizer` a folder may lack one: token ids go in and come out; there are no stop strings then, and no
    structured outputs.
    Raises: ModelFolderError naming the file and the reason.
    """
    from chatcache.engine.engine import Engine

    tokenizer = load_tokenizer(config) if need_tokenizer or has_tokenizer(config) else None
    runner = load_runner(config, progress)
    if tokenizer is None:
        return Engine(runner, runner.facts, config)
    engine = Engine(runner, runner.facts, config, tokenizer.token_bytes, special_ids=tokenizer.special_ids)
    engine.start_grammar_compiler()
    return engine


def load_runner(config: EngineConfig, progress: Progress | None = None) -> Runner:
    """Load the model alone, for a caller who will close it.

    Raises: ModelFolderError naming the file and the reason.
    """
    from chatcache.model.loading.loader import load_model

    return load_model(config, progress)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """Load the tokenizer of the model `config` names.

    Raises: ModelFolderError naming the file and the reason.
    """
    from chatcache.model.loading.files import as_model_folder_error, check_links
    from chatcache.tokenizer.tokenizer import read_tokenizer

    folder = model_folder(config)
    check_links(folder)
    with as_model_folder_error(folder):
        return read_tokenizer(folder)


def has_tokenizer(config: EngineConfig) -> bool:
    """Whether the model's folder has a tokenizer at all."""
    folder = model_folder(config)
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def model_folder(config: EngineConfig) -> Path:
    """The folder `config.model` stands for; fetches a Hugging Face id that is not on this machine yet."""
    from chatcache.model.loading.files import resolve_model_path

    return resolve_model_path(config.model)


def check_model_folder(config: EngineConfig) -> None:
    """Look at a local model folder without loading it: cheap enough to do before anything else starts.

    Raises: ModelFolderError naming the file and the reason.
    """
    from chatcache.model.loading.files import as_model_folder_error, read_config, weight_files

    if config.model.count("/") == 1 and not Path(config.model).exists() and config.model[0] not in "./~":
        return  # a Hugging Face id: the engine fetches it
    folder = model_folder(config)
    with as_model_folder_error(folder):
        read_config(folder)
        weight_files(folder)


def check_weight_files(config: EngineConfig) -> None:
    """Read the headers of a local model folder's weights: whether they are whole, and lie as they should.

    Raises: ModelFolderError naming the file and the reason.
    """
    from chatcache.model.loading.files import as_model_folder_error, weight_files
    from chatcache.model.loading.weights import Weights  # which needs torch

    folder = model_folder(config)
    with as_model_folder_error(folder):
        Weights(weight_files(folder))


def served_name(config: EngineConfig) -> str:
    """The name clients call the model by: as configured, else the id or the folder's name."""
    from chatcache.model.loading.files import model_name

    return config.served_model_name or model_name(config.model)
