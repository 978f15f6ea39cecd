"""Build an engine from a configuration.

This is the only place where model, tokenizer and scheduler meet. The CLI, `LLM`, the benchmarks and the engine process
(which imports it by the name `BUILD_ENGINE`) share it. Heavy modules are imported inside the functions, so that
importing this module is cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from chatcache.config import EngineConfig

if TYPE_CHECKING:
    from chatcache.engine.engine import Engine
    from chatcache.model.runner import Runner
    from chatcache.tokenizer.tokenizer import Tokenizer

BUILD_ENGINE = "chatcache.factory:build_engine"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")

Progress = Callable[[float, str], None]


def build_engine(config: EngineConfig, progress: Progress | None = None, *, need_tokenizer: bool = True) -> Engine:
    """Load the model into an engine.

    `progress` receives a fraction 0..1 and the current activity. Without `need_tokenizer` the folder may lack a
    tokenizer: requests and results are token ids then, without stop strings and structured outputs.
    Raises: ModelFolderError naming the file and the reason.
    """
    tokenizer = load_tokenizer(config) if need_tokenizer or has_tokenizer(config) else None
    engine = new_engine(load_runner(config, progress), config, tokenizer)
    if tokenizer is not None:
        engine.start_grammar_compiler()
    return engine


def new_engine(runner: Runner, config: EngineConfig, tokenizer: Tokenizer | None) -> Engine:
    """Return an engine that runs a loaded model; the end token of the tokenizer ends an output, too."""
    from chatcache.engine.engine import Engine

    model_info = runner.model_info
    if tokenizer is None:
        return Engine(runner, model_info, config)
    own = (token for token in tokenizer.eos_token_ids if token < model_info.vocab_size)
    ends = tuple(dict.fromkeys((*model_info.eos_token_ids, *own)))
    model_info = msgspec.structs.replace(model_info, eos_token_ids=ends)
    return Engine(runner, model_info, config, tokenizer.token_bytes, special_ids=tokenizer.special_ids)


def load_runner(config: EngineConfig, progress: Progress | None = None) -> Runner:
    """Load the model alone; the caller closes it.

    Raises: ModelFolderError naming the file and the reason.
    """
    from chatcache.model.loading.loader import load_model

    return load_model(config, progress)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """Load the tokenizer of `config.model`, with its chat template or that of `config.chat_template`.

    Raises: ModelFolderError naming the file and the reason.
    """
    from chatcache.model.loading.files import as_model_folder_error, check_links
    from chatcache.tokenizer.tokenizer import read_tokenizer

    folder = model_folder(config)
    check_links(folder)
    with as_model_folder_error(folder):
        return read_tokenizer(folder, template_file=Path(config.chat_template) if config.chat_template else None)


def has_tokenizer(config: EngineConfig) -> bool:
    """Return whether the model's folder has a tokenizer."""
    folder = model_folder(config)
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def model_folder(config: EngineConfig) -> Path:
    """Return the folder of `config.model`; downloads a Hugging Face id that is not cached."""
    from chatcache.model.loading.files import resolve_model_path

    return resolve_model_path(config.model)


def check_model_folder(config: EngineConfig) -> None:
    """Check a local model folder without loading it, which is cheap enough to do first.

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
    """Check that the weight files of a local model folder are complete and well-formed.

    Only their headers are read. Raises: ModelFolderError naming the file and the reason.
    """
    from chatcache.model.loading.files import as_model_folder_error, weight_files
    from chatcache.model.loading.weights import Weights  # which needs torch

    folder = model_folder(config)
    with as_model_folder_error(folder):
        Weights(weight_files(folder))


def served_name(config: EngineConfig) -> str:
    """Return the name of the model for clients: as configured, else its id or folder name."""
    from chatcache.model.loading.files import model_name

    return config.served_model_name or model_name(config.model)
