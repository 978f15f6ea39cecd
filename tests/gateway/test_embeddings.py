"""`/v1/embeddings`, `/v1/score`, `/v1/rerank`: values, shapes, limits, cancellation and fairness."""

from __future__ import annotations

import base64
import json
import resource
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatcache.config import EngineConfig, ServerConfig
from chatcache.gateway.api import embeddings
from chatcache.types.plan import F32
from tests.gateway.serving import MAX_MODEL_LEN, MODEL, PAGE_SIZE, Server, hurry, post_bytes, slowed, wait_until
from tests.support.fake_runner import FAKE_HIDDEN, fake_states, history_of

URL = "/v1/embeddings"


def vector(tokens: Sequence[int], dimensions: int | None = None) -> F32:
    """Return the embedding of the hash model, computed without an engine."""
    state: F32 = fake_states(np.array([history_of(tokens)], np.uint64))[0, :dimensions]
    return state / np.float32(np.linalg.norm(state))


def ids_of(server: Server, text: str) -> list[int]:
    return list(server.tokenizer.encode(text, add_special_tokens=True))


def vectors(answer: Any) -> list[Any]:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    assert {each["object"] for each in answer["data"]} == {"embedding"}
    return [each["embedding"] for each in answer["data"]]


def embed(server: Server, given: object, **fields: object) -> Any:
    status, _, answer = server.post(URL, input=given, model=MODEL, **fields)
    assert status == 200, answer
    return answer


def refused(server: Server, path: str = URL, **body: object) -> Any:
    status, _, answer = server.post(path, **body)
    assert 400 <= status < 500, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return answer["error"]


def test_every_form_of_input_has_the_embedding_of_its_tokens(server: Server) -> None:
    texts = ["Hello there", "a"]
    ids = [ids_of(server, text) for text in texts]
    want = [vector(each) for each in ids]
    for given, expected in (
        (texts[0], want[:1]),
        (texts, want),
        (ids[0], want[:1]),
        (ids, want),
        ([texts[1]], want[1:]),
        ([ids[1]], want[1:]),
    ):
        answer = embed(server, given, user="x")
        np.testing.assert_allclose(vectors(answer), expected, atol=1e-6)
        assert (answer["object"], answer["model"]) == ("list", MODEL)
        count = sum(len(each) for each, state in zip(ids, want, strict=True) if any(state is one for one in expected))
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == count
    server.wait_idle()


def test_base64_equals_float(server: Server) -> None:
    texts = ["one", "two", "three three"]
    plain, packed = (embed(server, texts, encoding_format=form) for form in ("float", "base64"))
    decoded = [np.frombuffer(base64.b64decode(each), "<f4").tolist() for each in vectors(packed)]
    assert decoded == vectors(plain)
    assert np.allclose(np.linalg.norm(decoded, axis=1), 1.0, atol=1e-6)


def test_dimensions_shorten_and_normalise(server: Server) -> None:
    (got,) = vectors(embed(server, "Hello there", dimensions=3))
    np.testing.assert_allclose(got, vector(ids_of(server, "Hello there"), 3), atol=1e-6)
    error = refused(server, input="Hi", dimensions=FAKE_HIDDEN + 1)
    assert error["param"] == "dimensions" and f"between 1 and {FAKE_HIDDEN}" in error["message"]
    server.wait_idle()


def test_cached_prefix_is_reported_and_changes_no_value(server: Server) -> None:
    text = "A text that is long enough for several pages. " * 3
    first, second = embed(server, text), embed(server, text)
    assert vectors(first) == vectors(second)
    num_tokens = len(ids_of(server, text))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == num_tokens - 1
    salted = embed(server, text, cache_salt="other")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_two_thousand_inputs_equal_single_ones_and_a_longer_list_is_refused(server: Server) -> None:
    texts = [f"text {number % 1500}" for number in range(2048)]  # some occur twice
    answer = embed(server, texts, encoding_format="base64")
    got = [np.frombuffer(base64.b64decode(each), "<f4") for each in vectors(answer)]
    for number in (0, 1, 777, 1499, 2047):
        np.testing.assert_allclose(got[number], vector(ids_of(server, texts[number])), atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(len(ids_of(server, text)) for text in texts)
    error = refused(server, input=[*texts, "one more"])
    assert error["param"] == "input" and error["message"] == "input: at most 2048 inputs, got 2049"
    server.wait_idle()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "input must have at least 1 character"),
        (["a", ""], "at least 1 character"),
        ([], "input must have at least 1 element"),
        ([[]], "at least 1 element"),
        ([[1], []], "at least 1 element"),
        (["a", 1], "texts and token ids do not mix"),
        (["a", [1]], "texts and token ids do not mix"),
        ([1, [1]], "texts and token ids do not mix"),
        ([-1], "must be at least 0"),
        ([10**6], "token ids must be between 0 and"),
        ([[1], [2**31 - 1]], "token ids must be between 0 and"),
        ([2**40], "input"),
        ([1.5], "input"),
        ([True], "input"),
        ([None], "input"),
        ({"text": "a"}, "input"),
        (7, "input"),
        (None, "input"),
    ],
)
def test_invalid_input_is_refused_with_its_reason(server: Server, given: object, message: str) -> None:
    error = refused(server, input=given)
    assert error["type"] == "invalid_request_error" and message in error["message"], error


def test_missing_and_invalid_fields_are_refused(server: Server) -> None:
    assert refused(server)["code"] == "missing_required_parameter"
    assert refused(server, input="a", encoding_format="int8")["param"] == "encoding_format"
    for dimensions in (0, -1, 2**40, "3", 1.5):
        assert refused(server, input="a", dimensions=dimensions)["param"] == "dimensions"
    assert refused(server, input="a", model="none")["code"] == "model_not_found"
    assert refused(server, input="a", truncate_prompt_tokens=8)["code"] == "unsupported_parameter"
    assert refused(server, input="a", priority=1)["param"] == "priority"
    _, headers, _ = server.post(URL, input="a", input_type="query")
    assert headers["x-chatcache-ignored"] == "input_type"


def test_too_long_input_is_refused_and_the_whole_context_accepted(server: Server) -> None:
    whole = [number % 200 for number in range(MAX_MODEL_LEN)]
    (got,) = vectors(embed(server, [whole]))
    np.testing.assert_allclose(got, vector(whole), atol=1e-6)
    error = refused(server, input=[[1], [*whole, 1]])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert f"input 1 has {MAX_MODEL_LEN + 1} tokens" in error["message"]
    assert refused(server, input="word " * 500_000)["code"] == "context_length_exceeded"
    error = refused(server, input=[[number % 200, *whole[1:]] for number in range(300)])
    assert "at most 300000 tokens in all" in error["message"]
    server.wait_idle()


def test_huge_list_is_refused_without_much_memory(server: Server) -> None:
    embed(server, "warm")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "at most" in refused(server, input=["a"] * 800_000)["message"]
    assert "at most" in refused(server, input=[1] * 1_300_000)["message"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024


def test_score_is_the_cosine_of_the_embeddings(server: Server) -> None:
    texts = ["Hello", "there you are", "Hello"]
    want = [float(vector(ids_of(server, "Hello")) @ vector(ids_of(server, text))) for text in texts]
    for body in (
        {"text_1": "Hello", "text_2": texts},
        {"queries": "Hello", "documents": texts},
        {"text_1": ["Hello"] * 3, "text_2": texts},
    ):
        status, _, answer = server.post("/v1/score", model=MODEL, **body)
        assert status == 200, answer
        assert [(each["index"], each["object"]) for each in answer["data"]] == [(n, "score") for n in range(3)]
        np.testing.assert_allclose([each["score"] for each in answer["data"]], want, atol=1e-6)
        assert answer["object"] == "list" and answer["id"].startswith("score-") and answer["usage"]["total_tokens"]
    assert answer["data"][0]["score"] == pytest.approx(1.0) and abs(answer["data"][1]["score"]) <= 1.0


def test_invalid_scores_are_refused(server: Server) -> None:
    path = "/v1/score"
    assert refused(server, path, text_1="a")["code"] == "missing_required_parameter"
    assert refused(server, path, text_1="a", queries="b", text_2="c")["param"] == "queries"
    assert "got 2 and 3" in refused(server, path, text_1=["a", "b"], text_2=["a", "b", "c"])["message"]
    assert refused(server, path, text_1="a", text_2=[])["param"] == "text_2"
    assert refused(server, path, text_1="a", text_2="")["param"] == "text_2"
    long = refused(server, path, text_1="a", text_2="word " * 4000)
    assert (long["code"], long["param"]) == ("context_length_exceeded", "text_2")
    assert "text_2: input 0" in long["message"]
    assert refused(server, path, text_1="word " * 4000, text_2="a")["param"] == "text_1"
    assert refused(server, path, queries="word " * 4000, documents="a")["param"] == "queries"
    assert refused(server, path, queries="a", documents=["b", "word " * 4000])["param"] == "documents"
    assert refused(server, "/v1/rerank", query="word " * 4000, documents=["a"])["param"] == "query"
    assert "documents: input 1" in refused(server, "/v1/rerank", query="a", documents=["b", "word " * 4000])["message"]


def test_rerank_orders_documents_by_similarity(server: Server) -> None:
    documents = ["one", "Hello", "two", "three"]
    status, _, answer = server.post(
        "/v1/rerank", model=MODEL, query="Hello", documents=[*documents[:2], {"text": "two"}, "three"], top_n=3
    )
    assert status == 200, answer
    query = vector(ids_of(server, "Hello"))
    scores = [float(query @ vector(ids_of(server, text))) for text in documents]
    order = sorted(range(4), key=lambda index: -scores[index])[:3]
    assert [each["index"] for each in answer["results"]] == order and order[0] == 1
    assert [each["document"]["text"] for each in answer["results"]] == [documents[index] for index in order]
    np.testing.assert_allclose(
        [each["relevance_score"] for each in answer["results"]], [scores[index] for index in order], atol=1e-6
    )
    bare = server.post("/v1/rerank", query="a", documents=["b"], return_documents=False)[2]
    assert set(bare["results"][0]) == {"index", "relevance_score"}
    assert refused(server, "/v1/rerank", query="a", documents=[])["param"] == "documents"


def test_disconnect_aborts_every_input(server: Server) -> None:
    with slowed(server, 0.5):
        body = json.dumps({"input": [f"text {number}" for number in range(500)]}).encode()
        with server.connect() as connection:
            connection.sendall(post_bytes(server.port, URL, body))
            assert server.gateway.model is not None
            service = server.gateway.model.service
            wait_until(lambda: 0 < service.num_live <= embeddings.MAX_IN_FLIGHT, "inputs are running")
        wait_until(lambda: not service.num_live, "every input ended")
    server.wait_idle()
    assert server.gateway.is_idle


def test_other_requests_run_between_the_inputs_of_a_long_list(server: Server) -> None:
    """A chat request that arrives after a list of inputs does not wait for all of them."""
    done_s: dict[str, float] = {}
    noise = np.random.default_rng(3).integers(0, 200, (250, 900)).tolist()

    def post(name: str, path: str, **body: object) -> None:
        assert server.post(path, **body)[0] == 200
        done_s[name] = time.perf_counter()

    with slowed(server, 0.05):
        many = threading.Thread(target=post, args=("many", URL), kwargs={"input": noise})
        many.start()
        assert server.gateway.model is not None
        service = server.gateway.model.service
        wait_until(lambda: service.num_live > 0, "inputs are running")
        post("chat", "/v1/completions", prompt="Hi", max_tokens=2)
        hurry(server)
        many.join()
    assert done_s["chat"] < done_s["many"]
    server.wait_idle()


def test_list_longer_than_the_queue_is_embedded(tmp_path: Path) -> None:
    """With a short queue fewer inputs are submitted at a time; no input is lost."""
    config = EngineConfig(max_queued_requests=2, max_num_seqs=1)
    with Server(ServerConfig(db=str(tmp_path / "chat.db")), engine_config=config) as small:
        small.wait_ready()
        texts = [f"text {number}" for number in range(100)]
        got = vectors(embed(small, texts))
        np.testing.assert_allclose(got, [vector(ids_of(small, text)) for text in texts], atol=1e-6)
        small.wait_idle()


def test_pages_of_embeddings_are_those_of_chats(server: Server) -> None:
    text = "The same words again and again, " * 4
    embed(server, text)
    answer = server.post("/v1/completions", prompt=text, max_tokens=1)[2]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= len(ids_of(server, text)) - PAGE_SIZE
