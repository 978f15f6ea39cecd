"""A server whose model generates scripted tokens; everything else is real."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from chatcache.config import ServerConfig
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.plan import F32, Draws, StepResult
from tests.gateway.serving import Server
from tests.support.fake_runner import FakeRunner
from tests.tokenizer.families import tokenizer_of

_SURE = 60.0  # far above any logit of the hash


class ScriptedRunner(FakeRunner):
    """Candidate k of the next request generates `scripts[k]`, subject to masks, then ends."""

    scripts: Sequence[Sequence[int]] = ()
    _begin: int | None = None
    _wanted: dict[int, list[int]]  # by history: what each candidate says next, in the order of draws

    def say(self, scripts: Sequence[Sequence[int]]) -> None:
        self.scripts, self._begin = scripts, None

    def draw(self, draws: Draws, histories: Sequence[np.uint64], last_tokens: Sequence[int]) -> StepResult:
        self._wanted = {}
        for row, lane, position in zip(draws.row.tolist(), draws.lane.tolist(), draws.position.tolist(), strict=True):
            if self.scripts:
                self._begin = position if self._begin is None else self._begin
                script = self.scripts[lane % len(self.scripts)]
                wanted = script[min(position - self._begin, len(script) - 1)]
                self._wanted.setdefault(int(histories[row]), []).append(wanted)
        return super().draw(draws, histories, last_tokens)

    def logits(self, history: np.uint64) -> F32:
        logits = super().logits(history)
        if wanted := self._wanted.get(int(history)):
            logits[wanted.pop(0)] = _SURE
        return logits


class ScriptedServer(Server):
    """Call `say` before each request."""

    def say(self, *texts: str) -> list[list[int]]:
        """Set the replies of the next request; return their token ids without the end token."""
        scripts = [self.tokenizer.encode_after("", text) for text in texts]
        assert isinstance(self.runner, ScriptedRunner)
        self.runner.say([[*script, self.tokenizer.eos_token_ids[0]] for script in scripts])
        return scripts


def scripted(path: Path, family: str, **config: str) -> contextlib.AbstractContextManager[ScriptedServer]:
    """Start a server with a tokenizer of that model family."""
    return scripted_with(path, tokenizer_of(family), **config)


@contextlib.contextmanager
def scripted_with(path: Path, tokenizer: Tokenizer, **config: str) -> Iterator[ScriptedServer]:
    settings = ServerConfig(db=str(path / "chat.db"), sse_keep_alive_interval_s=0, **config)  # type: ignore[arg-type]
    with scripted_server(settings, tokenizer) as server:
        yield server.wait_ready()  # type: ignore[misc]


def scripted_server(config: ServerConfig, tokenizer: Tokenizer) -> ScriptedServer:
    """Return a server that is not started yet."""
    return ScriptedServer(
        config,
        load_tokenizer=lambda: tokenizer,
        tokenizer=tokenizer,
        max_model_len=4096,
        runner_class=ScriptedRunner,
        eos_every=0,
    )


@pytest.fixture(scope="module")
def hermes_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server of the Hermes format. Modules assign it to `module_server`, which `server` of the conftest uses."""
    with scripted(tmp_path_factory.mktemp("db"), "hermes") as server:
        yield server
