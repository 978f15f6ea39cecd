"""Test inputs that ended or subverted other engines; `advisories.py` maps advisories to these tests."""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import socket
import struct
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from chatcache.errors import InvalidRequestError
from chatcache.gateway.openapi import document
from chatcache.gateway.routes import ROUTES
from chatcache.tokenizer.tokenizer import read_tokenizer
from chatcache.types.events import Finished
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams, StructuredOutputs
from tests.gateway.serving import Server, read_all
from tests.llm.tiny_llama import write_tokenizer
from tests.security.corrupted_folders import pattern
from tests.security.test_adversarial_load import fake_engine

SEED = int(os.environ.get("CHATCACHE_TEST_SEED", 18))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=4, logit_bias={0: 100.0}),
        SamplingParams(max_tokens=4, logit_bias={0: 100.0}, temperature=0.0, logprobs=20, stop=("x",)),
        SamplingParams(n=4, max_tokens=4, logit_bias={0: 100.0}),
        SamplingParams(n=2, best_of=4, max_tokens=4, logit_bias={0: 100.0}),
        SamplingParams(n=3, distinct=True, max_tokens=4, logit_bias={0: 100.0}),
        SamplingParams(max_tokens=4, logit_bias={0: 100.0}, structured_outputs=StructuredOutputs(regex="[a-z]*")),
        BeamSearchParams(beam_width=3, max_tokens=4, stop_token_ids=tuple(range(64)), early_stopping=True),
    ],
    ids=["sample", "greedy", "n", "best_of", "distinct", "regex", "beams"],
)
def test_engine_reply_without_text_finishes(params: Params) -> None:
    engine = fake_engine()
    engine.add(GenerateRequest(request_id="a", prompt=(5, 6, 7), params=params))
    events = []
    while engine.has_work():
        events += engine.step()
    assert isinstance(events[-1], Finished), events
    engine.cache.check()


OPTIONAL: dict[str, list[Any]] = {
    "max_tokens": [1, 2, None],
    "max_completion_tokens": [1, None],
    "min_tokens": [0, 1, 2, 5, None],
    "n": [1, 2, None],
    "best_of": [None, 2],
    "logprobs": [True, False, None],
    "top_logprobs": [0, 20, 21, None],
    "temperature": [0, 1, None],
    "top_p": [1, 0.1, None],
    "top_k": [-1, 0, 5, None],
    "min_p": [0, 1, None],
    "stop": ["a", ["a", "b"], [], None],
    "stop_token_ids": [[0], [], None],
    "logit_bias": [{"1": 1}, {}, None],
    "seed": [0, -1, None],
    "stream": [False, None],
    "stream_options": [{"include_usage": True}, None],
    "response_format": [{"type": "json_object"}, {"type": "text"}, None],
    "structured_outputs": [{"regex": "a+"}, {}, None],
    "tools": [[], None],
    "tool_choice": ["none", None],
    "presence_penalty": [0, 2, None],
    "repetition_penalty": [1, 2, None],
    "beam_width": [2, None],
    "use_beam_search": [True, False, None],
    "length_penalty": [0, None],
    "early_stopping": [True, "never", None],
    "distinct": [True, False, None],
    "ignore_eos": [True, None],
    "priority": [0, 1, None],
    "user": ["x", None],
    "metadata": [{}, None],
}


@pytest.mark.parametrize("count", [150, pytest.param(5_000, marks=pytest.mark.long)])
@pytest.mark.slow
def test_random_fields_with_nulls_are_answered(server: Server, count: int) -> None:
    """A null that bypasses a rule across fields has ended other engines."""
    draw = random.Random(SEED)
    statuses = set()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(count):
            names = draw.sample(sorted(OPTIONAL), draw.randint(0, 8))
            body = {"messages": USER, "max_tokens": 2} | {name: draw.choice(OPTIONAL[name]) for name in names}
            answer = client.post(CHAT, json=body)
            assert answer.status_code in (200, 400), (body, answer.text)
            statuses.add(answer.status_code)
    assert statuses == {200, 400}


@pytest.mark.parametrize("value", [0, -1, 65, 2**31, 2**63, 10**400, 1.5, "1", True, [], {}])
@pytest.mark.parametrize("name", ["n", "best_of", "beam_width"])
def test_counts_over_the_limit_are_refused(server: Server, name: str, value: Any) -> None:
    status, _, answer = server.post(CHAT, messages=USER, max_tokens=1, **{name: value})
    assert status == 400, answer


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("name", ["n", "temperature", "top_p", "max_tokens", "seed", "presence_penalty"])
def test_non_finite_json_numbers_are_refused(server: Server, name: str, literal: str) -> None:
    body = json.dumps({"messages": USER})[:-1] + f', "{name}": {literal}}}'
    status, _, answer = server.request("POST", CHAT, raw=body.encode())
    assert status == 400, answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["x"] * 65}),
        (COMPLETIONS, {"prompt": [[1]] * 100_000}),
        (CHAT, {"messages": USER * 5_000}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 5_000}]}),
        ("/detokenize", {"tokens": [1] * 1_100_000}),
    ],
    ids=["prompts", "many prompts", "messages", "parts", "tokens"],
)
def test_request_with_too_many_items_is_refused(server: Server, path: str, body: Any) -> None:
    status, _, answer = server.post(path, **body, **({} if path == "/detokenize" else {"max_tokens": 1}))
    assert status in (400, 413), answer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
        ("prompt_embeds", base64.b64encode(b"\x80\x04N.").decode()),
        ("logits_processors", ["os.system"]),
        ("kv_transfer_params", {"remote_block_ids": [1]}),
        ("mm_processor_kwargs", {"x": 1}),
        ("cache_salt", "\x00" * 999),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unsupported_dangerous_field_is_refused_by_name(server: Server, path: str, name: str, value: Any) -> None:
    prompt = {"messages": USER} if path == CHAT else {"prompt": "Hi"}
    status, _, answer = server.post(path, **prompt, max_tokens=1, **{name: value})
    assert status == 400 and answer["error"]["param"].partition(".")[0] == name


@pytest.mark.parametrize("kind", ["image_url", "input_image", "file", "input_audio", "video_url"])
def test_urls_of_a_request_are_not_fetched(server: Server, kind: str) -> None:
    part = {"type": kind, kind: {"url": "http://127.0.0.1:9/"}, "image_url": "http://127.0.0.1:9/"}
    status, _, _ = server.post(CHAT, messages=[{"role": "user", "content": [part]}], max_tokens=1)
    assert status == 400


def test_no_request_field_names_a_page_a_hash_or_a_namespace() -> None:
    """The server derives cache keys from the tenant and the bytes that it processes.

    `cache_salt` divides the keys within the tenant, see tests/gateway/test_cache_salt.py. `page_texts` is a switch: it
    adds the text of the caller's own prompt to the answer.
    """
    names: set[str] = set()
    for title, schema in document(ROUTES, "0")["components"]["schemas"].items():
        if title.endswith("Request"):
            names |= set(schema.get("properties", {}))
    assert "temperature" in names
    words = ("hash", "page", "block", "slot", "salt", "namespace", "tenant", "public", "request_id")
    assert {name for name in names if any(word in name for word in words)} == {"cache_salt", "page_texts"}


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "x"])
def test_compressed_bodies_are_refused_unread(server: Server, coding: str) -> None:
    bomb = gzip.compress(bytes(1 << 20))
    headers = {"content-encoding": coding, "content-type": "application/json"}
    for path in (CHAT, "/v1/conversations/import"):
        status, _, answer = server.request("POST", path, raw=bomb, headers=headers)
        assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")


def _upgrade(server: Server) -> socket.socket:
    connection = server.connect()
    connection.sendall(
        f"GET /v1/responses HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        "sec-websocket-extensions: permessage-deflate; client_max_window_bits\r\n\r\n".encode()
    )
    return connection


def test_websocket_compression_is_refused(server: Server) -> None:
    """The extension is not negotiated; a frame marked as compressed closes its connection with 1002."""
    with _upgrade(server) as connection:
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(4096)
        assert head.startswith(b"HTTP/1.1 101") and b"permessage-deflate" not in head.lower()
        connection.sendall(b"\xc1\x84\x00\x00\x00\x00abcd")  # text, RSV1 set, masked with zeros
        frame = head.split(b"\r\n\r\n", 1)[1] + read_all(connection)
    assert struct.pack(">H", 1002) in frame


def test_equal_client_chosen_ids_make_separate_requests(server: Server) -> None:
    """Send the same `x-request-id` and `user` concurrently and repeatedly."""
    expected = server.post(COMPLETIONS, prompt=[5, 6, 7], max_tokens=8, seed=3)[2]["choices"][0]["text"]
    answers: list[tuple[int, str, str]] = []

    def ask() -> None:
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "seed": 3, "user": "a", "request_id": "a"}
        status, headers, answer = server.request("POST", COMPLETIONS, body, headers={"x-request-id": "same"})
        answers.append((status, headers["x-request-id"], answer["choices"][0]["text"]))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [(200, "same", expected)] * 8


@pytest.mark.parametrize("prefix", ["", "r", "resp", "resp_", "resp_0", "%", "*", "resp_*"])
def test_prefix_of_an_id_is_not_found(server: Server, prefix: str) -> None:
    status, _, made = server.post("/v1/responses", input="Hi", max_output_tokens=2)
    assert status == 200
    for method, path in (("POST", f"/v1/responses/{prefix}/cancel"), ("DELETE", f"/v1/responses/{prefix}")):
        assert server.request(method, path.replace("%", "%25"))[0] in (404, 405)
    assert server.request("GET", f"/v1/responses/{made['id']}")[0] == 200


@pytest.mark.parametrize("value", ["bytes=0-,0-,0-" + ",0-" * 2000, "bytes=0-0" + ",1-1" * 3000, "bytes=-1" * 3000])
def test_many_byte_ranges_are_ignored(server: Server, value: str) -> None:
    for path in ("/", "/assets/x.js", "/favicon.svg"):
        assert server.request("GET", path, headers={"range": value})[0] < 500


def test_tokenizer_panic_fails_the_request_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    pattern("^(?:(z+)+)+$")(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    with pytest.raises(InvalidRequestError, match="cannot encode this text"):
        tokenizer.encode("z" * 64 + "!")
    assert tokenizer.decode(tokenizer.encode("fine")) == "fine"


# `make audit` checks complete advisory databases and needs the network. These are the known relevant vulnerabilities:
# the lowest version without them, and the advisory.
SOUND = {
    "starlette": ("1.3.1", "CVE-2026-54283, -48710"),
    "jinja2": ("3.1.6", "CVE-2025-27516"),
    "redis": ("5.0", "CVE-2023-28858, -28859"),
    "torch": ("2.10", "CVE-2025-32434, CVE-2026-24747"),
    "transformers": ("5.10.0", "CVE-2026-4372, -5241, -9856"),
    "websockets": ("9.1", "CVE-2021-33880"),
}
# Transitive dependencies, with the lowest required version.
BROUGHT = {"h11": ("0.16", "CVE-2025-43859"), "urllib3": ("2.6.3", "CVE-2026-21441")}


@pytest.mark.parametrize("name", SOUND)
def test_required_version_excludes_known_vulnerabilities(name: str) -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    found = next(each for each in map(Requirement, project["dependencies"]) if each.name == name)
    floors = [Version(each.version) for each in found.specifier if each.operator in (">=", "==")]
    assert floors and max(floors) >= Version(SOUND[name][0])


@pytest.mark.parametrize("name", [*SOUND, *BROUGHT])
def test_installed_version_excludes_known_vulnerabilities(name: str) -> None:
    assert Version(version(name)) >= Version((SOUND | BROUGHT)[name][0])
