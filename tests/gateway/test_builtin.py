"""Token alternatives of the demo model, against a direct forward of the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from websockets.sync.client import connect

from chatcache.config import EngineConfig, ServerConfig
from chatcache.factory import build_engine, load_tokenizer, model_folder
from tests.gateway.frames import ask, text_of
from tests.gateway.serving import Server
from tests.gateway.test_tokens import get, stored_ids, tokens_path

CONFIG = EngineConfig(dtype="float32", attention_backend="reference", device="cpu", kv_memory_bytes=8 * 2**20)
PLAIN = {"temperature": 0, "max_output_tokens": 24}


@pytest.fixture(scope="module")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tokenizer = load_tokenizer(CONFIG)
    config = ServerConfig(db=str(tmp_path_factory.mktemp("db") / "chat.db"))
    server = Server(
        config, load_tokenizer=lambda: tokenizer, tokenizer=tokenizer, build_engine=lambda: build_engine(CONFIG)
    )
    with server:
        yield server.wait_ready()
        server.wait_idle()


@pytest.fixture(scope="module")
def forward() -> Any:
    """Log-probabilities [V] of what follows these ids."""
    model = AutoModelForCausalLM.from_pretrained(model_folder(CONFIG), dtype=torch.float32).eval()

    def run(ids: list[int]) -> Any:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].double(), dim=-1)

    return run


def test_token_alternatives_equal_a_direct_forward_of_the_demo_model(builtin: Server, forward: Any) -> None:
    with connect(f"ws://127.0.0.1:{builtin.port}/v1/responses") as socket:
        response = ask(socket, input="What is the capital of France?", **PLAIN, ignore_eos=False)
        prompt, reply = stored_ids(builtin, response)
        text, spans = text_of(response), get(builtin, tokens_path(response))["data"]
        assert len(reply) > 4 and spans[-1]["end"] == len(text)
        for index in range(0, len(reply), 3):
            look = get(builtin, f"{tokens_path(response)}/{index}?top=20")
            expected = forward([*prompt, *reply[:index]])
            top = torch.topk(expected, 20)
            assert [each["logprob"] for each in look["alternatives"]] == pytest.approx(top.values.tolist(), abs=2e-4)
            for each in (look["token"], *look["alternatives"]):
                assert each["logprob"] == pytest.approx(float(expected[each["id"]]), abs=2e-4)
            assert look["token"]["rank"] == 1, "it was greedy"
            assert look["usage"]["cached_tokens"] == look["usage"]["input_tokens"] - 1
        at = len(reply) // 2
        look = get(builtin, f"{tokens_path(response)}/{at}")
        other = next(each for each in look["alternatives"][1:] if not each["ends"])
        location = {"previous_item_id": response["output"][0]["id"], "fork_at": at, "fork_with": other["id"]}
        fork = ask(socket, **location, **PLAIN, ignore_eos=False)
    begun = text[: spans[at]["start"]] + other["text"]
    assert text_of(fork).startswith(begun) and text_of(fork) != text
    ids = stored_ids(builtin, fork)[1]
    for index in range(at + 1, len(ids)):
        assert int(forward([*prompt, *ids[:index]]).argmax()) == ids[index], "what follows is the model's own"
