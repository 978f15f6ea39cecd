"""Coding agents as npm packages, and a server with a scripted model for them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatcache.config import ServerConfig
from chatcache.types.plan import Draws, StepPlan, StepResult
from chatcache.types.request import GenerateRequest
from tests.gateway.scripted import ScriptedRunner, ScriptedServer
from tests.gateway.serving import PAGE_SIZE
from tests.tokenizer.families import tokenizer_of

FOLDER = Path(__file__).resolve().parent
MAX_MODEL_LEN = 131_072
NUM_PAGES = 100_000
MAX_NEW_TOKENS = 1_000  # of one turn; the prompts of agents begin with many more

Answer = Callable[[str], str]
"""Returns the text that the model generates after a prompt."""


class AgentRunner(ScriptedRunner):
    """Generates the reply of each prompt, also for prompts that run at the same time, and counts computed tokens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_computed = 0
        self.replies: dict[int, list[int]] = {}  # by length of the prompt

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_computed += len(plan.rows.tokens)
        return super().execute(plan)

    def draw(self, draws: Draws, histories: Sequence[np.uint64], last_tokens: Sequence[int]) -> StepResult:
        self._wanted = {}
        for row, position in zip(draws.row.tolist(), draws.position.tolist(), strict=True):
            begin = max(length for length in self.replies if length <= position)
            reply = self.replies[begin]
            self._wanted.setdefault(int(histories[row]), []).append(reply[min(position - begin, len(reply) - 1)])
        return super(ScriptedRunner, self).draw(draws, histories, last_tokens)


class AgentServer(ScriptedServer):
    """Answers every prompt with `answer` of its text.

    `prompts`: the token ids of the prompts in order, with the number of tokens that were computed before each.
    """

    answer: Answer
    prompts: list[tuple[tuple[int, ...], int]]

    def record(self) -> None:
        """Set the reply of each request when it is submitted."""
        runner, submit = self.runner, self.engine.submit
        assert isinstance(runner, AgentRunner)
        self.prompts = []

        async def recording(request: GenerateRequest) -> None:
            text = self.answer(self.tokenizer.decode(request.prompt, skip_special_tokens=False))
            reply = [*self.tokenizer.encode_after("", text), self.tokenizer.eos_token_ids[0]]
            runner.replies = dict([*runner.replies.items(), (len(request.prompt), reply)][-2:])
            self.prompts.append((request.prompt, runner.num_computed))
            await submit(request)

        self.engine.submit = recording  # type: ignore[method-assign]

    def num_computed(self, at: int) -> int:
        """Return how many tokens were computed from prompt `at` until the next one was sent."""
        assert isinstance(self.runner, AgentRunner)
        ends = [*(before for _, before in self.prompts), self.runner.num_computed]
        at %= len(self.prompts)
        return ends[at + 1] - ends[at]

    def check_only_new_were_computed(self, earlier: int, later: int) -> None:
        """Check with the runner's count that prompt `later` continued `earlier`, and only its new part was computed."""
        before, prompt = self.prompts[earlier][0], self.prompts[later][0]
        assert prompt[: len(before)] == before
        num_new = len(prompt) - len(before)
        assert num_new < MAX_NEW_TOKENS < len(before)
        reply = self.answer(self.tokenizer.decode(prompt, skip_special_tokens=False))
        num_reply = len(self.tokenizer.encode_after("", reply))
        assert self.num_computed(later) <= num_new + num_reply + PAGE_SIZE


@contextlib.contextmanager
def agent_server(path: Path, answer: Answer) -> Iterator[AgentServer]:
    """Start a server whose model generates `answer` of each prompt, with a context for the prompts of agents."""
    tokenizer = tokenizer_of("hermes")
    server = AgentServer(
        ServerConfig(db=str(path / "chat.db"), sse_keep_alive_interval_s=0),
        load_tokenizer=lambda: tokenizer,
        tokenizer=tokenizer,
        max_model_len=MAX_MODEL_LEN,
        num_pages=NUM_PAGES,
        runner_class=AgentRunner,
        eos_every=0,
    )
    server.answer = answer
    with server:
        server.wait_ready()
        server.record()
        yield server


def executable(package: str, name: str) -> str:
    """Return the path of an installed agent; skip the test without it."""
    found = FOLDER / package / "node_modules" / ".bin" / name
    if not found.exists():
        pytest.skip(f"{name} is not installed: make clients")
    return str(found)


def start(command: Sequence[str], folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start an agent in an empty home."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**kept, "HOME": str(folder), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run_json(command: Sequence[str], folder: Path, **environment: str) -> list[dict[str, Any]]:
    """Run an agent that prints JSON lines, in an empty home, and return them."""
    with start(command, folder, **environment) as agent:
        try:
            output, errors = agent.communicate(timeout=120)
        finally:
            agent.kill()
    assert agent.returncode == 0, (output[-3000:] + errors[-3000:]).decode()
    return [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as the model of `agent_server` writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
