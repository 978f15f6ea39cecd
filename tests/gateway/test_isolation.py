"""Cache figures do not depend on other tenants: random probes against a model of the cache."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chatcache.config import ServerConfig
from chatcache.kv_cache import page_hash as chain
from chatcache.kv_cache.page_hash import namespace_hash
from tests.gateway.keyed import give
from tests.gateway.serving import PAGE_SIZE, Server, tiny_tokenizer

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
DECLARED = "You are everybody's helper: kind, brief, and never in a hurry."
NUM_TENANTS, NUM_USERS = 4, 2


@dataclass
class Trie:
    """The tokens that one tenant has computed."""

    children: dict[int, Trie] = field(default_factory=dict)

    def add(self, tokens: Sequence[int]) -> None:
        node = self
        for token in tokens:
            node = node.children.setdefault(token, Trie())

    def num_common(self, tokens: Sequence[int]) -> int:
        node, count = self, 0
        for token in tokens:
            if token not in node.children:
                break
            node, count = node.children[token], count + 1
        return count


@dataclass
class Counted:
    """`foreign`: cached tokens that are neither own nor public. `own`: all other cached tokens."""

    foreign: int = 0
    own: int = 0
    by_other_users: int = 0  # of the own: those that another user of the tenant computed
    num_probes: int = 0


class Prober:
    """The users of one tenant, with prompts much like those of other tenants."""

    def __init__(self, server: Server, keys: Sequence[str], draw: random.Random) -> None:
        self._server = server
        self._keys = keys
        self._draw = draw
        self._said = Trie()
        self._users = [Trie() for _ in keys]
        self._public = num_tokens_of([{"role": "system", "content": DECLARED}]) // PAGE_SIZE * PAGE_SIZE
        self.counted = Counted()

    def probe(self) -> None:
        """One request of one user; a few words of a few choices, so that others have said the like."""
        draw = self._draw
        user = draw.randrange(len(self._keys))
        words = " ".join(draw.choice(("red", "green", "blue")) for _ in range(draw.randint(2, 14)))
        messages = [{"role": "user", "content": words}]
        is_public = draw.random() < 0.3
        if is_public:
            messages.insert(0, {"role": "system", "content": DECLARED})
        kind = draw.choice(("chat", "chat", "completion", "response", "explain"))
        prompt = tiny_tokenizer().render_ids(messages)
        if kind == "completion":  # the same tokens by another door, where nothing is public
            is_public = False
        cached = getattr(self, f"_{kind}")(self._keys[user], messages, prompt)
        of_all, public = self._said.num_common(prompt), self._public if is_public else 0
        own = max(of_all, public)
        counted = self.counted
        counted.num_probes += 1
        counted.foreign += max(0, cached - own)
        counted.own += min(cached, own)
        of_user = self._users[user].num_common(prompt)
        counted.by_other_users += max(0, min(cached, of_all) - max(of_user, public))
        if kind != "explain":
            self._said.add(prompt)
            self._users[user].add(prompt)

    def _chat(self, key: str, messages: Any, prompt: Any) -> int:
        usage = self._post(key, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def _completion(self, key: str, messages: Any, prompt: Any) -> int:
        usage = self._post(key, "/v1/completions", {"prompt": list(prompt), "max_tokens": 1})["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def _response(self, key: str, messages: Any, prompt: Any) -> int:
        body = {"input": messages, "store": False, "max_output_tokens": 1}
        return int(self._post(key, "/v1/responses", body)["usage"]["input_tokens_details"]["cached_tokens"])

    def _explain(self, key: str, messages: Any, prompt: Any) -> int:
        answer = self._post(key, "/v1/cache/explain", {"messages": messages})
        assert (answer["miss"] or {}).get("reason") != "other_namespace"
        return int(answer["cached_tokens"])

    def _post(self, key: str, path: str, body: object) -> Any:
        # One connection per request: the server would close an idle one while this process waits for the CPU.
        status, _, answer = self._server.request("POST", path, body, {"authorization": f"Bearer {key}"})
        assert status == 200, answer
        return answer


def num_tokens_of(messages: Any) -> int:
    return len(tiny_tokenizer().render_ids(messages, add_generation_prompt=False))


@contextmanager
def probers(folder: Path, num_pages: int) -> Iterator[list[Prober]]:
    """Yield one prober per tenant."""
    config = ServerConfig(db=str(folder / "c.db"), shared_system_prompts=(DECLARED,))
    keys = [
        [give(config, f"tenant-{at}", f"user-{user}").key for user in range(NUM_USERS)] for at in range(NUM_TENANTS)
    ]
    with Server(config, num_pages=num_pages) as server:
        server.wait_ready()
        yield [Prober(server, users, random.Random(SEED + at)) for at, users in enumerate(keys)]
        server.wait_idle()


def counted(folder: Path, num_probes: int) -> Counted:
    """Probe from all tenants concurrently and count the cached tokens."""
    # Many probes: more pages than are checked after every step.
    with probers(folder, 2048 if num_probes < 1000 else 40_000) as asking, ThreadPoolExecutor(len(asking)) as pool:

        def probe(prober: Prober) -> Counted:
            for _ in range(num_probes // len(asking)):
                prober.probe()
            return prober.counted

        found = list(pool.map(probe, asking))
    return Counted(*(sum(each) for each in zip(*map(astuple, found), strict=True)))


@pytest.mark.parametrize(
    "num_probes", [100, pytest.param(400, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.long)]
)
@pytest.mark.slow
def test_cache_counts_exclude_pages_of_other_tenants(tmp_path: Path, num_probes: int) -> None:
    """Goal G19. Positive control: users of one tenant do share pages."""
    found = counted(tmp_path, num_probes)
    print(f"G19: {found}")
    assert found.foreign == 0 and found.num_probes == num_probes
    assert found.own > 2 * num_probes and found.by_other_users > 0


def test_isolation_check_finds_missing_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected bug: page hashes do not include the tenant."""
    monkeypatch.setattr(chain, "namespace_hash", lambda key, namespace, salt="": namespace_hash(key, "", salt))
    assert counted(tmp_path, 100).foreign > 0
