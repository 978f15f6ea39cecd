"""Decoding modes over HTTP and WebSocket give the same results as the engine itself."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import ClientConnection

from chatcache.config import EngineConfig, ServerConfig
from chatcache.engine.engine import Engine
from chatcache.gateway.api import completions
from chatcache.tokenizer.bad_words import encode_bad_words
from chatcache.types.events import CandidateDone, Started, TokenLogprob, Tokens
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from tests.gateway.frames import Frame, receive, send, until_end
from tests.gateway.serving import MAX_MODEL_LEN, Server, hurry, slowed, tiny_tokenizer, wait_until
from tests.support.fake_runner import FakeRunner, fake_model_info

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "How much wood would a woodchuck"
SPECIAL = tiny_tokenizer().added_tokens
IDS = tuple(tiny_tokenizer().encode(PROMPT, add_special_tokens=True))
# name: what the wire is sent, and what the engine then must have been asked
SEARCHES: dict[str, tuple[dict[str, Any], Params]] = {
    "beams": ({"beam_width": 4, "n": 3}, BeamSearchParams(beam_width=4, n=3, max_tokens=9)),
    "groups": (
        {"beam_width": 6, "n": 6, "num_beam_groups": 3, "diversity_penalty": 2.5},
        BeamSearchParams(beam_width=6, num_beam_groups=3, diversity_penalty=2.5, max_tokens=9),
    ),
    "beams with changed logits": (
        {
            "beam_width": 4,
            "n": 3,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "logit_bias": {"40": 2.0},
            "bad_words": ["e", "t"],
        },
        BeamSearchParams(
            beam_width=4,
            n=3,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            logit_bias={40: 2.0},
            bad_words_ids=encode_bad_words(["e", "t"], tiny_tokenizer()),
            max_tokens=9,
        ),
    ),
    "allowed tokens": (
        {"n": 2, "best_of": 3, "seed": 3, "allowed_token_ids": [40, 41, 42]},
        SamplingParams(n=2, best_of=3, seed=3, allowed_token_ids=(40, 41, 42), max_tokens=9),
    ),
    "vLLM's spelling": (
        {"use_beam_search": True, "n": 4, "num_beam_groups": 2, "diversity_penalty": 1, "length_penalty": 0.5},
        BeamSearchParams(beam_width=4, num_beam_groups=2, diversity_penalty=1.0, length_penalty=0.5, max_tokens=9),
    ),
    "best_of": ({"n": 2, "best_of": 6, "seed": 3}, SamplingParams(n=2, best_of=6, seed=3, max_tokens=9)),
    "distinct": ({"n": 8, "distinct": True, "seed": 3}, SamplingParams(n=8, distinct=True, seed=3, max_tokens=9)),
}


def fresh_engine() -> Engine:
    tokenizer = tiny_tokenizer()
    eos = tokenizer.eos_token_ids
    runner = FakeRunner(vocab_size=tokenizer.vocab_size, eos=eos[0])
    model_info = fake_model_info(tokenizer.vocab_size, eos, MAX_MODEL_LEN)
    return Engine(runner, model_info, EngineConfig(), tokenizer.token_bytes)


def direct(params: Params) -> list[tuple[list[int], float]]:
    """The oracle: tokens and score of each candidate, of a fresh engine asked without any wire."""
    engine = fresh_engine()
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
def test_request_parameters_reach_the_engine_unchanged(server: Server, name: str) -> None:
    fields, params = SEARCHES[name]
    status, _, answer = server.post(COMPLETIONS, prompt=PROMPT, max_tokens=9, return_token_ids=True, **fields)
    assert status == 200, answer
    expected = direct(params)
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids for ids, _ in expected]
    assert [choice["score"] for choice in answer["choices"]] == pytest.approx([score for _, score in expected])


def test_diverse_beam_groups_and_distinct_candidates_differ(server: Server) -> None:
    def candidates(**fields: Any) -> list[list[int]]:
        body = {"prompt": PROMPT, "max_tokens": 4, "n": 6, "ignore_eos": True, "return_token_ids": True, **fields}
        return [choice["token_ids"] for choice in server.post(COMPLETIONS, **body)[2]["choices"]]

    plain, grouped = candidates(beam_width=6), candidates(beam_width=6, num_beam_groups=6, diversity_penalty=100)
    assert len({ids[0] for ids in plain}) < len({ids[0] for ids in grouped}) == 6
    cold = {"temperature": 0.002, "seed": 1}
    assert len({tuple(ids) for ids in candidates(**cold)}) < 6
    assert len({tuple(ids) for ids in candidates(**cold, distinct=True)}) == 6


def test_distinct_candidates_have_their_log_probability_as_score(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "n": 5, "distinct": True, "logprobs": 0, "ignore_eos": True}
    for choice in server.post(COMPLETIONS, **body, seed=2)[2]["choices"]:
        assert choice["score"] == pytest.approx(sum(choice["logprobs"]["token_logprobs"]), abs=1e-4)


def test_sampled_candidates_have_no_score(server: Server) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        (choice,) = server.post(path, max_tokens=2, **body)[2]["choices"]
        assert "score" not in choice


def watch(page: ClientConnection, **fields: Any) -> tuple[list[Frame], Frame]:
    """(frames of live beams, the response)."""
    send(page, input="Hello", max_output_tokens=12, ignore_eos=True, skip_special_tokens=False, **fields)
    frames = until_end(page)
    assert frames[-1]["type"] in ("response.completed", "response.incomplete"), frames[-1]
    return [frame for frame in frames if frame["type"] == "response.beam"], frames[-1]["response"]


def test_beam_frames_form_one_tree_with_the_results(page: ClientConnection) -> None:
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


def test_beam_frames_are_sent_only_on_request(page: ClientConnection, socket: ClientConnection) -> None:
    assert watch(page, beam_width=3)[0] == []
    send(socket, input="x", beam_width=3, stream_beams=True)
    refusal = receive(socket)
    assert (refusal["type"], refusal["error"]["param"]) == ("error", "stream_beams")
    send(page, input="x", stream_beams=True)
    assert receive(page)["error"]["param"] == "stream_beams"


def test_beam_search_streams_the_common_prefix(server: Server) -> None:
    """Text comes before the end, and adds up."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "beam_width": 3, "n": 2, "max_tokens": 40}
    whole = server.post(CHAT, **body, ignore_eos=True)[2]
    frames = server.stream(CHAT, **body, ignore_eos=True)[1].decode().split("\n\n")
    chunks = [json.loads(frame[6:]) for frame in frames if frame.startswith("data: {")]
    received: dict[int, list[str]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            received[choice["index"]].append(choice["delta"].get("content") or "")
    assert ["".join(received[index]) for index in (0, 1)] == [c["message"]["content"] for c in whole["choices"]]
    assert sum(bool(text) for text in received[0]) > 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "n": 3, "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": ["x"] * 9, "best_of": 8}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "beam_width": 3, "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "n": 2, "best_of": 3, "distinct": True}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "best_of": 2, "stream": True}, "best_of"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": -1}, "prompt_logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "distinct": True, "temperature": 0}, "distinct"),
    ],
)
def test_incompatible_fields_are_refused_by_name(server: Server, path: str, body: Any, param: str) -> None:
    status, _, answer = server.post(path, **body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert param in answer["error"]["message"]


def test_best_of_equal_to_n_can_be_streamed(server: Server) -> None:
    frames = server.stream(COMPLETIONS, prompt=PROMPT, n=2, best_of=2, max_tokens=3)[1].decode()
    assert frames.endswith("data: [DONE]\n\n") and '"score"' not in frames


def prompt_scores(ids: tuple[int, ...], num_top: int) -> tuple[TokenLogprob | None, ...]:
    """The oracle: as the engine itself reports them."""
    engine = fresh_engine()
    engine.add(
        GenerateRequest(request_id="r", prompt=ids, params=SamplingParams(max_tokens=1, prompt_logprobs=num_top))
    )
    events = [event for _ in range(9) for event in engine.step()]
    (started,) = [event for event in events if isinstance(event, Started)]
    return started.prompt_logprobs


def check_rows(rows: list[Any], ids: tuple[int, ...], num_top: int) -> None:
    expected = prompt_scores(ids, num_top)
    assert rows[0] is None and len(rows) == len(ids)
    for token, row, scored in zip(ids[1:], rows[1:], expected[1:], strict=True):
        assert scored is not None
        assert next(iter(row)) == str(token), "its own comes first"
        assert {int(key) for key in row} == {token, *(other for other, _ in scored.top)}
        assert row[str(token)]["logprob"] == pytest.approx(scored.logprob, abs=1e-5)
        for rank, (other, logprob) in enumerate(scored.top, start=1):
            assert row[str(other)]["rank"] == rank
            assert row[str(other)]["logprob"] == pytest.approx(logprob, abs=1e-5)
        assert row[str(token)]["decoded_token"] == tiny_tokenizer().token_bytes[token].decode("utf-8", "replace")


def test_prompt_logprobs_equal_the_engines_cached_or_not(server: Server) -> None:
    for _ in range(2):
        answer = server.post(COMPLETIONS, prompt=[PROMPT, "Hello there"], n=2, max_tokens=1, prompt_logprobs=3)[2]
        hello = tuple(tiny_tokenizer().encode("Hello there", add_special_tokens=True))
        for choice in answer["choices"]:
            check_rows(choice["prompt_logprobs"], IDS if choice["index"] < 2 else hello, 3)


@pytest.mark.parametrize(
    ("asked", "param"), [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "logprobs")]
)
def test_prompt_logprobs_are_limited_over_all_choices(
    server: Server, asked: Any, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MAX_PROMPT_LOGPROBS", 8 * len(IDS) * 21)
    assert server.post(COMPLETIONS, prompt=[PROMPT] * 2, n=4, max_tokens=1, **asked)[0] == 200
    status, _, answer = server.post(COMPLETIONS, prompt=[PROMPT] * 3, n=3, max_tokens=1, **asked)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert "at most" in answer["error"]["message"]


def test_chat_prompt_logprobs_equal_the_engines(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "How are you?"}], "max_tokens": 1, "return_token_ids": True}
    answer = server.post(CHAT, **body, prompt_logprobs=0)[2]
    check_rows(answer["prompt_logprobs"], tuple(answer["prompt_token_ids"]), 0)
    assert "prompt_logprobs" not in server.post(CHAT, **body)[2]


def test_echo_with_logprobs_starts_with_the_prompt(server: Server) -> None:
    answer = server.post(COMPLETIONS, prompt=PROMPT, max_tokens=2, ignore_eos=True, echo=True, logprobs=2)[2]
    (choice,) = answer["choices"]
    table, expected = choice["logprobs"], prompt_scores(IDS, 2)
    assert {len(column) for column in table.values()} == {len(IDS) + 2}
    assert (table["token_logprobs"][0], table["top_logprobs"][0]) == (None, None)
    shown = [entry.logprob for entry in expected if entry is not None]
    assert table["token_logprobs"][1 : len(IDS)] == pytest.approx(shown, abs=1e-5)
    assert all(len(top) <= 2 for top in table["top_logprobs"][1:])
    both = server.post(COMPLETIONS, prompt=PROMPT, max_tokens=2, echo=True, logprobs=1, prompt_logprobs=4)[2][
        "choices"
    ][0]
    check_rows(both["prompt_logprobs"], IDS, 4)
    assert all(len(top) <= 1 for top in both["logprobs"]["top_logprobs"][1:])


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"beam_width": 2}], ids=str)
def test_echo_without_output_returns_the_prompt_alone(server: Server, more: dict[str, Any]) -> None:
    body = {"prompt": [PROMPT, [5, 6]], "echo": True, "return_token_ids": True, **more}
    whole = server.post(COMPLETIONS, max_tokens=1, logprobs=2, ignore_eos=True, **body)[2]
    status, headers, answer = server.post(COMPLETIONS, max_tokens=0, logprobs=2, stop_token_ids=[*range(60)], **body)
    assert status == 200 and "x-chatcache-max-tokens" not in headers, answer
    assert len(answer["choices"]) == len(whole["choices"]) == 2 * more.get("n", 1)
    for choice, longer in zip(answer["choices"], whole["choices"], strict=True):
        text, ids = longer["text"], longer["prompt_token_ids"]
        assert choice["text"] == text[: longer["logprobs"]["text_offset"][-1]]
        assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("length", None, [])
        assert choice["prompt_token_ids"] == ids and "score" not in choice
        assert choice["logprobs"] == {name: values[: len(ids)] for name, values in longer["logprobs"].items()}
    counts = answer["usage"]
    assert counts["completion_tokens"] == 0 and counts["total_tokens"] == counts["prompt_tokens"]
    _, streamed = server.stream(COMPLETIONS, max_tokens=0, stream_options={"include_usage": True}, **body)
    chunks = [json.loads(line[6:]) for line in streamed.decode().splitlines() if line.startswith("data: {")]
    *parts, last = chunks
    texts = [""] * len(answer["choices"])
    for choice in (choice for chunk in parts for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
        assert choice["finish_reason"] in (None, "length") and not choice.get("token_ids")
    assert texts == [choice["text"] for choice in answer["choices"]]
    assert last["usage"]["completion_tokens"] == 0


def test_max_tokens_of_zero_without_echo_is_refused(server: Server) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        status, _, answer = server.post(path, max_tokens=0, **body)
        assert (status, answer["error"]["param"]) == (400, "max_tokens")
        assert answer["error"]["message"].startswith("max_tokens must be at least 1")


@pytest.mark.parametrize("prompt", ["<|im_start|>user\nHï 🎉<|im_end|>\n", "<|im_start|>", "s", PROMPT, "tokens"])
def test_echo_is_the_prompt_and_offsets_are_places_in_the_text(server: Server, prompt: str) -> None:
    ids = tiny_tokenizer().encode("<|im_start|>user\nHi", add_special_tokens=False)
    given: Any = ids if prompt == "tokens" else prompt
    shown = "<|im_start|>user\nHi" if prompt == "tokens" else prompt
    body = {"prompt": given, "max_tokens": 3, "ignore_eos": True, "echo": True, "seed": 3}
    num_prompt = len(ids) if prompt == "tokens" else len(tiny_tokenizer().encode(prompt, add_special_tokens=True))
    for skips in (True, False):
        (choice,) = server.post(COMPLETIONS, **body, logprobs=0, skip_special_tokens=skips)[2]["choices"]
        text, table = choice["text"], choice["logprobs"]
        assert text.startswith(shown) and len(table["tokens"]) == num_prompt + 3
        assert table["token_logprobs"][1:] and None not in table["token_logprobs"][1:]
        ends = [*table["text_offset"][1:], len(text)]
        for number, (token, start, end) in enumerate(zip(table["tokens"], table["text_offset"], ends, strict=True)):
            is_hidden = token == "<s>" if number < num_prompt else skips and token in SPECIAL
            expected = "" if is_hidden else token
            if "\ufffd" not in token:  # else its character belongs to the next token
                assert text[start:end].lstrip("\ufffd") == expected
        assert table["text_offset"][num_prompt] == len(shown)
    _, stream = server.stream(COMPLETIONS, **body)
    texts = [choice["text"] for event in _chunks(stream) for choice in event["choices"]]
    assert texts[0] == shown


def test_completion_token_ids_are_those_of_the_prompt_and_of_the_answer(server: Server) -> None:
    hello = tiny_tokenizer().encode("Hello there", add_special_tokens=True)
    body = {"prompt": [PROMPT, "Hello there"], "n": 2, "max_tokens": 4, "seed": 1, "return_token_ids": True}
    whole = server.post(COMPLETIONS, **body)[2]["choices"]
    assert [choice["prompt_token_ids"] for choice in whole] == [list(IDS), list(IDS), hello, hello]
    _, stream = server.stream(COMPLETIONS, **body)
    streamed: dict[str, dict[int, list[int]]] = {"token_ids": {}, "prompt_token_ids": {}}
    for choice in (choice for event in _chunks(stream) for choice in event["choices"]):
        for name, ids in streamed.items():
            ids.setdefault(choice["index"], []).extend(choice.get(name, ()))
    for name, ids in streamed.items():
        assert ids == {choice["index"]: choice[name] for choice in whole}


def _chunks(stream: bytes) -> list[dict[str, Any]]:
    *events, end = re.findall(rb"data: (.*)\n\n", stream)
    assert end == b"[DONE]"
    return [json.loads(event) for event in events]


def test_priority_without_the_priority_policy_is_refused(server: Server, page: ClientConnection) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        status, _, answer = server.post(path, max_tokens=1, priority=1, **body)
        assert (status, answer["error"]["param"]) == (400, "priority")
        assert server.post(path, max_tokens=1, priority=0, **body)[0] == 200
        assert server.post(path, max_tokens=1, priority=2**31, **body)[2]["error"]["param"] == "priority"
    send(page, input="x", priority=-1)
    assert receive(page)["error"]["param"] == "priority"


def test_request_with_higher_priority_finishes_first(tmp_path: Path) -> None:
    """With one busy slot, waiting requests run by priority value, not in order of arrival."""
    config = ServerConfig(db=str(tmp_path / "chat.db"))
    engine = EngineConfig(max_num_seqs=1, scheduling_policy="priority")
    begun: list[int] = []  # the last token of each prompt

    class Watched(FakeRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            rows = plan.rows
            begun.extend(rows.tokens[np.cumsum(rows.num_tokens) - 1][rows.start < 2].tolist())
            return super().execute(plan)

    def ask(priority: int) -> None:
        answer = server.post(COMPLETIONS, prompt=[7, priority % 5], max_tokens=100, ignore_eos=True, priority=priority)
        assert answer[0] == 200, answer

    with Server(config, engine_config=engine, runner_class=Watched) as server:
        server.wait_ready()
        with slowed(server, 0.5):
            threads = [threading.Thread(target=ask, args=(priority,)) for priority in (-9, 3, 2, -1)]
            for number, thread in enumerate(threads):
                thread.start()
                wait_until(lambda seen=number: num_known(server) > seen, "the request to be there")  # type: ignore[misc]
            hurry(server)
            for thread in threads:
                thread.join(60)
    assert begun == [priority % 5 for priority in (-9, -1, 2, 3)]


def num_known(server: Server) -> int:
    health = server.call(server.engine.health())
    return health.num_running + health.num_waiting
