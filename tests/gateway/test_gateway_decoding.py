"""What the engine can decode, asked for over the wire: the same answers as from the engine itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from websockets.sync.client import ClientConnection

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine.fake import FakeRunner, fake_facts
from chatcache.types import (
    BeamSearchParams,
    CandidateDone,
    GenerateRequest,
    Params,
    SamplingParams,
    Tokens,
)
from tests.gateway.frames import Frame, receive, send, until_end
from tests.gateway.serving import MAX_MODEL_LEN, Server, tiny_tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "How much wood would a woodchuck"
IDS = tuple(tiny_tokenizer().encode(PROMPT, add_special_tokens=True))
# name: what the wire is sent, and what the engine then must have been asked
SEARCHES: dict[str, tuple[dict[str, Any], Params]] = {
    "beams": ({"beam_width": 4, "n": 3}, BeamSearchParams(beam_width=4, n=3, max_tokens=9)),
    "groups": (
        {"beam_width": 6, "n": 6, "num_beam_groups": 3, "diversity_penalty": 2.5},
        BeamSearchParams(beam_width=6, num_beam_groups=3, diversity_penalty=2.5, max_tokens=9),
    ),
    "vLLM's spelling": (
        {"use_beam_search": True, "n": 4, "num_beam_groups": 2, "diversity_penalty": 1, "length_penalty": 0.5},
        BeamSearchParams(beam_width=4, num_beam_groups=2, diversity_penalty=1.0, length_penalty=0.5, max_tokens=9),
    ),
    "distinct": ({"n": 8, "distinct": True, "seed": 3}, SamplingParams(n=8, distinct=True, seed=3, max_tokens=9)),
}


def direct(params: Params) -> list[tuple[list[int], float]]:
    """The oracle: tokens and score of each candidate, of a fresh engine asked without any wire."""
    tokenizer = tiny_tokenizer()
    eos = tokenizer.eos_token_ids
    runner = FakeRunner(vocab_size=tokenizer.vocab_size, eos=eos[0])
    engine = Engine(runner, fake_facts(tokenizer.vocab_size, eos, MAX_MODEL_LEN), EngineConfig())
    engine.add(GenerateRequest(request_id="r", prompt=IDS, params=params))
    found: dict[int, tuple[list[int], float]] = {}
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Tokens | CandidateDone):
                ids, _ = found.setdefault(event.index, ([], 0.0))
                if isinstance(event, Tokens):
                    ids += event.token_ids
                else:
                    found[event.index] = (ids, event.score)
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("name", SEARCHES)
def test_the_wire_asks_the_engine_what_the_client_asked(server: Server, name: str) -> None:
    fields, params = SEARCHES[name]
    status, _, answer = server.post(COMPLETIONS, prompt=PROMPT, max_tokens=9, return_token_ids=True, **fields)
    assert status == 200, answer
    expected = direct(params)
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids for ids, _ in expected]
    assert [choice["score"] for choice in answer["choices"]] == pytest.approx([score for _, score in expected])


def test_groups_differ_and_distinct_candidates_do(server: Server) -> None:
    def candidates(**fields: Any) -> list[list[int]]:
        body = {"prompt": PROMPT, "max_tokens": 4, "n": 6, "ignore_eos": True, "return_token_ids": True, **fields}
        return [choice["token_ids"] for choice in server.post(COMPLETIONS, **body)[2]["choices"]]

    plain, grouped = candidates(beam_width=6), candidates(beam_width=6, num_beam_groups=6, diversity_penalty=100)
    assert len({ids[0] for ids in plain}) < len({ids[0] for ids in grouped}) == 6
    cold = {"temperature": 0.002, "seed": 1}
    assert len({tuple(ids) for ids in candidates(**cold)}) < 6
    assert len({tuple(ids) for ids in candidates(**cold, distinct=True)}) == 6


def test_distinct_scores_are_their_log_probabilities(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "n": 5, "distinct": True, "logprobs": 0, "ignore_eos": True}
    for choice in server.post(COMPLETIONS, **body, seed=2)[2]["choices"]:
        assert choice["score"] == pytest.approx(sum(choice["logprobs"]["token_logprobs"]), abs=1e-4)


def test_plain_samples_have_no_score(server: Server) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        (choice,) = server.post(path, max_tokens=2, **body)[2]["choices"]
        assert "score" not in choice


def watch(page: ClientConnection, **fields: Any) -> tuple[list[Frame], Frame]:
    """(frames of live beams, the response)."""
    send(page, input="Hello", max_output_tokens=12, ignore_eos=True, skip_special_tokens=False, **fields)
    frames = until_end(page)
    assert frames[-1]["type"] in ("response.completed", "response.incomplete"), frames[-1]
    return [frame for frame in frames if frame["type"] == "response.beam"], frames[-1]["response"]


def test_live_beams_grow_one_tree_that_holds_the_winners(page: ClientConnection) -> None:
    beams, response = watch(page, beam_width=4, n=2, stream_beams=True)
    texts: dict[int, str] = {0: ""}
    for frame in beams:
        assert frame["response_id"] == response["id"]
        for node in frame["nodes"]:
            assert node["id"] not in texts, "every node is told once"
            texts[node["id"]] = texts[node["parent"]] + node["text"]
        assert len(frame["live"]) <= 4 and set(frame["live"]) <= set(texts)
    lines = [texts[node].rstrip("\ufffd") for node in beams[-1]["live"]]
    for item in response["output"]:  # what ended is no longer live: the last token came after the last report
        assert any(item["content"][0]["text"].startswith(line) for line in lines)
    assert response["output"][0]["score"] >= response["output"][1]["score"]


def test_nobody_is_told_of_beams_unasked(page: ClientConnection, socket: ClientConnection) -> None:
    assert watch(page, beam_width=3)[0] == []
    send(socket, input="x", beam_width=3, stream_beams=True)
    refusal = receive(socket)
    assert (refusal["type"], refusal["error"]["param"]) == ("error", "stream_beams")
    send(page, input="x", stream_beams=True)
    assert receive(page)["error"]["param"] == "stream_beams"


def test_beams_stream_what_they_agree_on(server: Server) -> None:
    """Text comes before the end, and adds up."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "beam_width": 3, "n": 2, "max_tokens": 40}
    whole = server.post(CHAT, **body, ignore_eos=True)[2]
    frames = server.stream(CHAT, **body, ignore_eos=True)[1].decode().split("\n\n")
    chunks = [json.loads(frame[6:]) for frame in frames if frame.startswith("data: {")]
    told: dict[int, list[str]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            told[choice["index"]].append(choice["delta"].get("content") or "")
    assert ["".join(told[index]) for index in (0, 1)] == [c["message"]["content"] for c in whole["choices"]]
    assert sum(bool(text) for text in told[0]) > 1
