"""What the official `openai` client can ask and this server refuses: each with a reason, none silently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.gateway.serving import MODEL, Server

pytestmark = pytest.mark.client("openai (Python)")

USER: Any = [{"role": "user", "content": "Hello"}]
PICTURE = "data:image/png;base64,aGk="
Ask = Callable[[openai.OpenAI], object]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def shown(*parts: Any) -> Any:
    return [{"role": "user", "content": list(parts)}]


REFUSED: dict[str, tuple[Ask, str]] = {
    "image in chat": (
        lambda client: client.chat.completions.create(
            model=MODEL, messages=shown({"type": "image_url", "image_url": {"url": PICTURE}})
        ),
        "only text and file parts are supported",
    ),
    "image in responses": (
        lambda client: client.responses.create(
            model=MODEL, input=shown({"type": "input_image", "image_url": PICTURE, "detail": "auto"})
        ),
        "only text and file parts are supported",
    ),
    "file by its id": (
        lambda client: client.responses.create(model=MODEL, input=shown({"type": "input_file", "file_id": "file_x"})),
        "file_id is not supported here; send the file as file_data",
    ),
    "audio output": (
        lambda client: client.chat.completions.create(
            model=MODEL, messages=USER, modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"}
        ),
        "audio is not supported here",
    ),
    "text after the completion": (
        lambda client: client.completions.create(model=MODEL, prompt="Once", suffix="end"),
        "suffix is not supported here",
    ),
    "old function calls": (
        lambda client: client.chat.completions.create(model=MODEL, messages=USER, functions=[{"name": "clock"}]),
        "functions is not supported here; send tools",
    ),
    "prompt template": (
        lambda client: client.responses.create(model=MODEL, input="Hello", prompt={"id": "pmpt_x"}),
        "prompt is not supported here",
    ),
    "background without storing": (
        lambda client: client.responses.create(model=MODEL, input="Hello", background=True, store=False),
        "background needs store",
    ),
    "unknown model": (
        lambda client: client.chat.completions.create(model="gpt-5.6", messages=USER),
        "no model 'gpt-5.6'; this server has",
    ),
    "files": (lambda client: client.files.list(), "no route GET /v1/files"),
    "moderations": (lambda client: client.moderations.create(input="Hello"), "no route POST /v1/moderations"),
    "images": (lambda client: client.images.generate(prompt="A cat"), "no route POST /v1/images/generations"),
    "speech": (
        lambda client: client.audio.speech.create(input="Hello", model="tts", voice="alloy"),
        "no route POST /v1/audio/speech",
    ),
    "vector stores": (lambda client: client.vector_stores.list(), "no route GET /v1/vector_stores"),
    "batches": (lambda client: client.batches.list(), "no route GET /v1/batches"),
    "fine-tuning": (lambda client: client.fine_tuning.jobs.list(), "no route GET /v1/fine_tuning/jobs"),
    "stored chat completions": (
        lambda client: client.chat.completions.list(),
        "/v1/chat/completions does not take GET; it takes POST",
    ),
}


@pytest.mark.parametrize(
    ("ask", "reason"),
    [pytest.param(*case, id=name, marks=pytest.mark.refused(case[1])) for name, case in REFUSED.items()],
)
def test_refused(client: openai.OpenAI, ask: Ask, reason: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client)
    assert reason in caught.value.message and 400 <= caught.value.status_code < 500
    assert caught.value.request_id and caught.value.code
