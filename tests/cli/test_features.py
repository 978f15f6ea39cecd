"""Engine features through the command, the engine process and HTTP, with a small real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cli.servers import Server, serving

pytestmark = pytest.mark.slow
KEYS = ("sk-first-tenant", "sk-second-tenant")
SYSTEM = "Answer every user in the same way, in short and complete sentences, and name sources."


@pytest.fixture(scope="module")
def tuned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cwd = tmp_path_factory.mktemp("tuned")
    (cwd / "system.txt").write_text(SYSTEM + "\n")
    keys = [argument for key in KEYS for argument in ("--api-key", key)]
    more = (
        "--deterministic",
        "--attention-backend",
        "cpu",
        "--scheduling-policy",
        "priority",
        "--preemption-mode",
        "swap",
        "--swap-space",
        "1MiB",
        *keys,
    )
    with serving(folder, cwd, "--shared-system-prompt", "system.txt", *more) as server:
        server.ready()
        yield server


@pytest.fixture(params=KEYS)
def client(tuned: Server, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tuned.url}/v1", api_key=request.param, max_retries=0) as client:
        yield client


def post(server: Server, path: str, key: str, **body: Any) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_banner_shows_swap_space_shared_prompts_and_keys(tuned: Server) -> None:
    assert "128 host pages, 1 MiB" in tuned.output
    assert "1 system prompt(s) shared by all tenants" in tuned.output
    assert "2 API key(s)" in tuned.output


def test_shared_system_prompt_is_cached_across_tenants(tuned: Server) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Secret"}]
    for key, shared in zip(KEYS, (False, True), strict=True):
        explained = post(tuned, "/v1/cache/explain", key, messages=messages)
        answer = post(tuned, "/v1/chat/completions", key, messages=messages, max_tokens=2, ignore_eos=True)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == explained["cached_tokens"] == (explained["public_tokens"] // 16 * 16 if shared else 0)
        assert explained["public_tokens"] > 16 and explained["page_size"] == 16
    assert post(tuned, "/v1/cache/explain", KEYS[0], messages=messages)["miss"] is None


def test_cache_accounts_are_read_from_the_engine_process(tuned: Server) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    accounts = httpx.get(f"{tuned.url}/v1/cache/accounts", headers=headers, timeout=60).json()
    assert (accounts["scope"], accounts["pages_in_use"], accounts["requests"]) == ("tenant", 0, [])
    assert accounts["page_bytes"] == 8192


def test_openai_client_gets_scores_logprobs_beams_and_distinct_candidates(client: openai.OpenAI) -> None:
    extra = {"prompt_logprobs": 2, "priority": -1, "best_of": 3, "ignore_eos": True}
    chat = client.chat.completions.create(
        model="tiny-llama", messages=[{"role": "user", "content": "Hi"}], n=2, max_tokens=4, extra_body=extra
    )
    assert len(chat.choices) == 2 and chat.model_extra is not None
    rows = chat.model_extra["prompt_logprobs"]
    assert chat.usage is not None and rows[0] is None and len(rows) == chat.usage.prompt_tokens
    scores = [(choice.model_extra or {})["score"] for choice in chat.choices]
    assert scores == sorted(scores, reverse=True)
    groups = {"beam_width": 4, "num_beam_groups": 2, "diversity_penalty": 9.0, "ignore_eos": True}
    beams = client.completions.create(model="tiny-llama", prompt="Hi", n=4, max_tokens=4, extra_body=groups)
    assert len(beams.choices) == 4
    drawn = {"distinct": True, "ignore_eos": True, "return_token_ids": True}
    distinct = client.completions.create(model="tiny-llama", prompt="Hi", n=5, max_tokens=2, extra_body=drawn)
    token_ids = {tuple((choice.model_extra or {})["token_ids"]) for choice in distinct.choices}
    assert len(token_ids) == 5 and {len(ids) for ids in token_ids} == {2}, "token ids differ; texts may be equal"


def test_metrics_report_host_pages(tuned: Server) -> None:
    text = httpx.get(f"{tuned.url}/metrics", headers={"authorization": f"Bearer {KEYS[0]}"}, timeout=60).text
    assert 'chatcache_kv_host_pages{state="free"} 128.0' in text
    assert "chatcache_broken_invariants_total 0.0" in text and 'chatcache_preemptions_total{kind="swap"} 0.0' in text


def test_answer_matches_the_requested_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny-llama",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    )
    assert json.loads(answer.choices[0].message.content or "").keys() == {"ok"}


def test_deterministic_with_the_reference_backend_is_refused(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, "--deterministic") as server:  # OPTIONS select the reference attention
        assert server.wait() == 78
        assert "deterministic needs the attention backend 'cpu'" in server.output
