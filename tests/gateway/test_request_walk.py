"""The call stack of one chat completion, from the socket to the model, crosses few modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from chatcache.conversations.replies.service import ChatService
from chatcache.engine_process.threaded import ThreadedEngine
from tests.gateway.documents import DOCS
from tests.gateway.serving import Server
from tests.support.fake_runner import FakeRunner

MAX_MODULES = 10
IN_PLACE_OF = {
    "chatcache.engine_process.threaded": "engine_process/process",
    "tests.support.fake_runner": "model/runner",
}


def stack_of_call(call: Callable[..., Any]) -> list[str]:
    """Return the modules with a frame on this stack, outermost first, and the module of `call`."""
    names = [frame.frame.f_globals["__name__"] for frame in reversed(inspect.stack(context=0))]
    return [*names, call.__module__]


def test_chat_completion_crosses_few_modules(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: dict[str, list[str]] = {}
    for owner, name in ((ChatService, "start"), (ThreadedEngine, "submit"), (FakeRunner, "launch")):
        original = getattr(owner, name)

        def recorded(*args: Any, _name: str = name, _call: Callable[..., Any] = original, **kwargs: Any) -> Any:
            stacks.setdefault(_name, stack_of_call(_call))
            return _call(*args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    assert server.request("POST", "/v1/chat/completions", body)[0] == 200
    names = [name for key in ("start", "submit", "launch") for name in stacks[key]]
    walk = dict.fromkeys(
        IN_PLACE_OF.get(name) or name.removeprefix("chatcache.").replace(".", "/")
        for name in names
        if name.startswith("chatcache.") or name in IN_PLACE_OF
    )
    assert {"gateway/api/chat_completions", "engine/engine", "model/runner"} <= walk.keys()
    assert len(walk) <= MAX_MODULES, list(walk)
    line = " -> ".join(f"`{name}`" for name in walk)
    assert line in " ".join((DOCS / "architecture.md").read_text().split())
