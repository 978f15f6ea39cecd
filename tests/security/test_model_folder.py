"""Test that a corrupted or malicious model folder is refused with the file name, and none of its code runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from chatcache import factory as compose
from chatcache.config import EngineConfig
from chatcache.errors import ModelFolderError
from chatcache.model.loading import files as folders
from chatcache.model.loading import weights
from chatcache.tokenizer import template_sandbox as template_weight
from chatcache.tokenizer import tokenizer as tokenizers
from chatcache.tokenizer.chat_template import ChatTemplate
from tests.cli.servers import serving
from tests.llm.tiny_llama import make_model, write_folder
from tests.security.corrupted_folders import MARKER_FILE, MUTATIONS, Mutation, remote_code

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("good") / "tiny"
    path.mkdir()
    write_folder(path, make_model())
    return path


def start(folder: Path) -> None:
    """Read a folder as a server start does: command line, tokenizer of the gateway, engine."""
    config = EngineConfig(model=str(folder), dtype="float32", attention_backend="reference", kv_memory_bytes=1 << 20)
    compose.check_model_folder(config)
    compose.load_tokenizer(config)
    compose.load_runner(config).close()


def check_refused(mutation: Mutation, good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    mutation.corrupt(folder)
    with pytest.raises(ModelFolderError) as caught:
        start(folder)
    message = caught.value.message
    assert str(folder) in message and mutation.file in message and mutation.words in message
    assert "\n" not in message and len(message) < 2000
    assert not list(tmp_path.rglob(MARKER_FILE)) and not Path(MARKER_FILE).exists(), "code of the folder was run"


def test_unchanged_folder_is_accepted(good: Path) -> None:
    start(good)
    assert len(MUTATIONS) >= 60


@pytest.mark.parametrize("name", MUTATIONS)
def test_corrupted_folder_is_refused_with_the_file_name(name: str, good: Path, tmp_path: Path) -> None:
    check_refused(MUTATIONS[name], good, tmp_path)


def test_unneeded_code_in_the_folder_is_ignored(good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    remote_code(folder)
    start(folder)
    assert not (folder / MARKER_FILE).exists()


def test_links_within_the_folder_and_the_hub_cache_are_followed(good: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / "0123"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(good.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    start(snapshot)


TWINS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "links are not checked": (
        lambda patch: patch.setattr(folders, "check_links", lambda folder: None),
        "shard a link outside",
    ),
    "tensor offsets are not checked": (
        lambda patch: patch.setattr(weights, "_check_layout", lambda *_: None),
        "weights with extra data",
    ),
    "values are not checked": (
        lambda patch: patch.setattr(weights, "is_finite", lambda tensor: True),
        "weight not a number",
    ),
    "templates are not tried": (
        lambda patch: patch.setattr(ChatTemplate, "check", lambda self, origin: None),
        "template mro",
    ),
    "value sizes are not limited": (
        lambda patch: patch.setattr(template_weight, "estimate_size", lambda value: 1),
        "template list in itself twice",
    ),
    "tokenizers are not tried": (lambda patch: patch.setattr(tokenizers, "_PROBES", ()), "tokenizer panics"),
}


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.slow
def test_folder_is_accepted_without_its_check(name: str, good: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    plant, mutation = TWINS[name]
    plant(monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE ModelFolderError"):  # the folder is accepted
        check_refused(MUTATIONS[mutation], good, tmp_path)


SERVED = [
    "pickle .bin",
    "weight not a number",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in MUTATIONS
        if name not in ("pickle .bin", "weight not a number")
    ),
]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.slow
def test_serve_exits_with_78_and_the_message(name: str, good: Path, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    mutation.corrupt(folder)
    with serving(folder, tmp_path) as server:
        assert server.wait() == 78
        assert mutation.file in server.output and mutation.words in server.output
        assert "Traceback" not in server.output
    assert not (folder / MARKER_FILE).exists()
