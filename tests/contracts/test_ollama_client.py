"""Test the official `ollama` client against the real server with a scripted model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ollama
import pydantic
import pytest

from tests.gateway.keyed import keyed
from tests.gateway.scripted import ScriptedServer, hermes_server
from tests.gateway.serving import MODEL, PAGE_SIZE, failing_after

pytestmark = [pytest.mark.slow, pytest.mark.client("ollama (Python)")]

USER = [{"role": "user", "content": "Weather in Zürich?"}]
CALL = (
    "<think>\nI should look.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
)
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


module_server = hermes_server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, trust_env=False) as client:
        yield client


def weather(city: str) -> str:
    """Describe the weather.

    Args:
        city: The city

    Returns:
        str: how it is
    """
    return f"Sunny in {city}"


def test_chat_stream_joins_to_the_whole_answer(client: ollama.Client, server: ScriptedServer) -> None:
    server.say("<think>\nHm.\n</think>\n\nA short answer.")
    whole = client.chat(MODEL, USER)
    *parts, last = client.chat(MODEL, USER, stream=True)
    assert "".join(part.message.content or "" for part in parts) == whole.message.content == "A short answer."
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking == "Hm."
    assert last.done and last.done_reason == whole.done_reason == "stop"
    assert last.eval_count == whole.eval_count and last.prompt_eval_count == whole.prompt_eval_count
    assert (last.total_duration or 0) >= (last.eval_duration or 0) > 0


def test_function_is_called_and_its_result_continues_the_chat(client: ollama.Client, server: ScriptedServer) -> None:
    server.say(CALL)
    first = client.chat(MODEL, USER, tools=[weather])
    (call,) = first.message.tool_calls or ()
    result = {"role": "tool", "tool_name": call.function.name, "content": weather(**call.function.arguments)}
    server.say("Sunny.")
    num_cached = server.call(server.gateway.health()).num_cached_tokens
    history: list[dict[str, str] | ollama.Message] = [*USER, first.message, result]
    second = client.chat(MODEL, history, tools=[weather])
    assert second.message.content == "Sunny."
    num_cached = server.call(server.gateway.health()).num_cached_tokens - num_cached
    assert num_cached >= (first.prompt_eval_count or 0) + (first.eval_count or 0) - PAGE_SIZE


def test_streamed_call_arrives_whole(client: ollama.Client, server: ScriptedServer) -> None:
    server.say(CALL)
    parts = list(client.chat(MODEL, USER, tools=[weather], stream=True))
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", {"city": "Zürich"})]


def test_schema_constrains_the_answer(client: ollama.Client, server: ScriptedServer) -> None:
    class City(pydantic.BaseModel):
        city: str
        people: int

    server.say('{"city": "Bern", "people": 7}')
    answer = client.chat(MODEL, USER, format=City.model_json_schema())
    assert City.model_validate_json(answer.message.content or "") == City(city="Bern", people=7)


def test_generate_streams_and_takes_options(client: ollama.Client, server: ScriptedServer) -> None:
    server.say("One two three four five six seven.")
    options = ollama.Options(num_predict=3, temperature=0.5, top_k=40, num_ctx=2048, stop=["never"])
    *parts, last = client.generate(MODEL, "Count", system="Be brief.", options=options, stream=True, keep_alive="5m")
    assert "".join(part.response or "" for part in parts) and last.done_reason == "length" and last.eval_count == 3


def test_log_probabilities_belong_to_the_text(client: ollama.Client, server: ScriptedServer) -> None:
    server.say("Fine.")
    answer = client.chat(MODEL, USER, logprobs=True, top_logprobs=3)
    entries = answer.logprobs or ()
    assert "".join(each.token for each in entries) == "Fine." == answer.message.content
    assert all(len(each.top_logprobs or ()) == 3 for each in entries)


def test_model_is_listed_shown_and_loaded(client: ollama.Client) -> None:
    (listed,) = client.list().models
    (loaded,) = client.ps().models
    shown = client.show(MODEL)
    assert listed.model == loaded.model == MODEL and listed.digest == loaded.digest
    assert loaded.context_length == (shown.modelinfo or {})["chatcache.context_length"] == 4096
    assert {"completion", "tools"} <= set(shown.capabilities or ()) and listed.modified_at is not None
    assert client.generate(f"{MODEL}:latest").done_reason == "load"


def test_embeddings_are_normalised(client: ollama.Client) -> None:
    found = client.embed(MODEL, ["Hello there", "How are you?"])
    assert all(sum(value * value for value in each) == pytest.approx(1.0) for each in found.embeddings)
    assert list(client.embeddings(MODEL, "How are you?").embedding) == list(found.embeddings[1])


async def test_async_client_streams(server: ScriptedServer) -> None:
    server.say("A short answer.")
    client = ollama.AsyncClient(host=server.url, trust_env=False)
    parts = [part async for part in await client.chat(MODEL, USER, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == "A short answer."
    await client.close()  # type: ignore[no-untyped-call]


def test_leaving_a_stream_frees_its_pages(client: ollama.Client, server: ScriptedServer) -> None:
    server.say("A rather long answer that does not end by itself. " * 20)
    stream = client.chat(MODEL, USER, stream=True)
    assert next(iter(stream)).message.content
    stream.close()  # type: ignore[attr-defined]
    server.wait_idle()


def test_error_during_a_stream_is_raised(client: ollama.Client, server: ScriptedServer) -> None:
    server.say("A rather long answer that does not end by itself. " * 20)
    with failing_after(server, 6), pytest.raises(ollama.ResponseError, match="failed"):
        list(client.chat(MODEL, USER, stream=True))


def test_key_is_sent_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with keyed(tmp_path) as keys:
        monkeypatch.delenv("OLLAMA_API_KEY", raising=False)
        with ollama.Client(host=keys.server.url, trust_env=False) as stranger:
            with pytest.raises(ollama.ResponseError, match="API key") as raised:
                stranger.chat(MODEL, USER)
            assert raised.value.status_code == 401
        monkeypatch.setenv("OLLAMA_API_KEY", keys.ann.key)
        with ollama.Client(host=keys.server.url, trust_env=False) as client:
            assert client.chat(MODEL, USER, options={"num_predict": 2}).done


@pytest.mark.refused("400: this server reads text only")
def test_images_are_refused(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="reads text only") as raised:
        client.chat(MODEL, [{"role": "user", "content": "What is this?", "images": [PICTURE]}])
    assert raised.value.status_code == 400


@pytest.mark.refused("404: this server has one model, chosen when it starts")
def test_pull_and_delete_are_refused(client: ollama.Client) -> None:
    for manage in (client.pull, client.delete):
        with pytest.raises(ollama.ResponseError, match="one model, chosen when it starts"):
            manage("llama3")


@pytest.mark.refused("400: the model's own chat template is used; context and suffix are not supported")
def test_template_context_and_suffix_are_refused(client: ollama.Client) -> None:
    for field in ({"template": "{{ .Prompt }}"}, {"context": [1, 2]}, {"suffix": "end"}):
        with pytest.raises(ollama.ResponseError, match=f"{next(iter(field))}.*not supported|chat template"):
            client.generate(MODEL, "Hi", **field)


@pytest.mark.refused("404: no such model; the message names the served one")
def test_other_model_is_refused(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="llama3") as raised:
        client.chat("llama3", USER)
    assert raised.value.status_code == 404
