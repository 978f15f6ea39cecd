"""The second turn, whatever the transport of the first and of the second: all that was computed comes from the cache.

The hash model's replies never are their own tokenisation, so only who keeps a reply's ids can find its pages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from chatcache.config import ServerConfig
from tests.gateway.frames import until_end
from tests.gateway.serving import Server, tiny_tokenizer

Json = dict[str, Any]
CHAT, RESPONSES, CONVERSATIONS = "/v1/chat/completions", "/v1/responses", "/v1/conversations"
SYSTEM = "Be brief and kind, and never in a hurry. " * 2
NUM_TOKENS = 21


@dataclass(frozen=True)
class Talk:
    """What was said so far, and what the last turn says of itself."""

    messages: tuple[Json, ...] = ()
    response_id: str | None = None
    conversation: str | None = None
    num_tokens: int = 0
    num_cached: int = 0
    last: Json = field(default_factory=dict)

    def then(self, text: str, reply: str, usage: Json, **ids: Any) -> Talk:
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        said = ({"role": "user", "content": text}, {"role": "assistant", "content": reply})
        return replace(
            self,
            messages=(*self.messages, *said),
            num_tokens=usage["total_tokens"],
            num_cached=details["cached_tokens"],
            **{"response_id": None, "conversation": None, **ids},
        )


def by_chat(server: Server, talk: Talk, text: str, *, stream: bool = False) -> Talk:
    messages = [{"role": "system", "content": SYSTEM}, *talk.messages, {"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": NUM_TOKENS, "ignore_eos": True, "skip_special_tokens": False}
    if not stream:
        answer = server.post(CHAT, **body)[2]
        return talk.then(text, answer["choices"][0]["message"]["content"], answer["usage"])
    data = server.stream(CHAT, **body, stream_options={"include_usage": True})[1].decode()
    chunks = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
    reply = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    return talk.then(text, reply, chunks[-1]["usage"])


def by_chat_stream(server: Server, talk: Talk, text: str) -> Talk:
    return by_chat(server, talk, text, stream=True)


def asked(talk: Talk, text: str) -> Json:
    """Body of a request that continues the last response, or contains the history without one."""
    body: Json = {"instructions": SYSTEM, "max_output_tokens": NUM_TOKENS, "ignore_eos": True}
    body |= {"skip_special_tokens": False}
    if talk.response_id is not None:
        return {**body, "input": text, "previous_response_id": talk.response_id}
    return {**body, "input": [*talk.messages, {"role": "user", "content": text}]}


def answered(talk: Talk, text: str, response: Json) -> Talk:
    reply = response["output"][0]["content"][0]["text"]
    conversation = response["conversation"]["id"]
    return talk.then(text, reply, response["usage"], response_id=response["id"], conversation=conversation)


def by_response(server: Server, talk: Talk, text: str) -> Talk:
    return answered(talk, text, server.post(RESPONSES, **asked(talk, text))[2])


def by_sse(server: Server, talk: Talk, text: str) -> Talk:
    data = server.stream(RESPONSES, **asked(talk, text))[1].decode()
    last = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")][-1]
    return answered(talk, text, last["response"])


def by_socket(server: Server, talk: Talk, text: str) -> Talk:
    with connect(f"ws://127.0.0.1:{server.port}{RESPONSES}") as socket:
        socket.send(json.dumps({"type": "response.create", **asked(talk, text)}))
        return answered(talk, text, until_end(socket)[-1]["response"])


def by_items(server: Server, talk: Talk, text: str) -> Talk:
    """Messages are put into the conversation first, and answered then."""
    said = {"role": "user", "content": text}
    if talk.conversation is None:
        conversation = server.post(CONVERSATIONS, items=[*talk.messages, said])[2]["id"]
    else:
        conversation = talk.conversation
        assert server.post(f"{CONVERSATIONS}/{conversation}/items", items=[said])[0] == 200
    body = {name: value for name, value in asked(talk, text).items() if name not in ("input", "previous_response_id")}
    return answered(talk, text, server.post(RESPONSES, **body, conversation=conversation)[2])


TRANSPORTS = (by_chat, by_chat_stream, by_response, by_sse, by_socket, by_items)


@pytest.mark.parametrize("first_by", TRANSPORTS)
def test_the_second_turn_finds_all_of_the_first(server: Server, first_by: Any) -> None:
    for then_by in TRANSPORTS:
        first = first_by(server, Talk(), f"Tell me of pages and {then_by.__name__}.")
        second = then_by(server, first, "And then?")
        # Every token but the last one said, which is drawn and not yet computed.
        assert second.num_cached == first.num_tokens - 1, then_by
        third = first_by(server, second, "And in the end?")
        assert third.num_cached == second.num_tokens - 1, then_by


@pytest.mark.parametrize("by", [by_chat, by_response])
def test_a_hybrid_model_computes_only_what_is_new(by: Any, tmp_path: Path) -> None:
    """Of a second conversation with the same system prompt, and of each later turn."""
    tokenizer = tiny_tokenizer()
    system = tokenizer.encode_rendered(tokenizer.render([{"role": "system", "content": SYSTEM}], False))
    end = max(index for index, token in enumerate(system, 1) if token in tokenizer.eos_token_ids)
    with Server(ServerConfig(db=str(tmp_path / "chat.db")), num_states=65) as server:
        talk = by(server, Talk(), "Tell me of pages.")
        assert talk.num_cached == 0
        other = by(server, Talk(), "What is a state?")
        assert other.num_cached >= end > len(SYSTEM) // 8
        for text in ("And then?", "And in the end?"):
            turn = by(server, talk, text)
            assert turn.num_cached == talk.num_tokens - 1
            talk = turn
