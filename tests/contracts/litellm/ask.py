"""Run by litellm's own environment: asks the server in the ways litellm can, and prints what came as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm  # type: ignore[import-not-found,unused-ignore]  # lives in an environment of its own

ASKED: dict[str, Any] = {
    "model": f"openai/{os.environ['MODEL']}",
    "api_base": f"{os.environ['SERVER']}/v1",
    "api_key": "unused",
    "messages": [{"role": "user", "content": "Hello, how are you?"}],
    "seed": 7,
    "max_tokens": 40,
    "num_retries": 0,
}


def _ask_provider(provider: str) -> dict[str, str]:
    """Ask over the API of another provider."""
    asked = {
        "model": f"{provider}/{os.environ['MODEL']}",
        "api_base": os.environ["SERVER"],
        "api_key": "unused",
        "messages": ASKED["messages"],
        "max_tokens": 20,
        "temperature": 0,  # a sampled reply of the hash model may be empty
        "num_retries": 0,
    }
    whole = litellm.completion(**asked)
    chunks = litellm.completion(**asked, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return {"text": whole.choices[0].message.content, "streamed": streamed}


def main() -> None:
    litellm.telemetry = False
    whole = litellm.completion(**ASKED)
    chunks = list(litellm.completion(**ASKED, stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=ASKED["messages"])
    many = litellm.completion(**ASKED, n=3)
    embedded = litellm.embedding(
        model=ASKED["model"],
        input=["Hello there", "How are you?"],
        api_base=ASKED["api_base"],
        api_key="unused",
        encoding_format="float",
    )
    efforts = [
        litellm.completion(**ASKED, reasoning_effort=effort, allowed_openai_params=["reasoning_effort"])
        for effort in ("none", "low")
    ]
    try:
        litellm.completion(**{**ASKED, "messages": [{"role": "user", "content": "word " * 20_000}]})
        refused = ""
    except litellm.ContextWindowExceededError:
        refused = "context"
    except litellm.BadRequestError:
        refused = "bad request"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    try:
        litellm.completion(**{**ASKED, "messages": [{"role": "user", "content": [image]}]})
        shown = ""
    except litellm.BadRequestError as error:
        shown = str(error)
    schema = {"type": "object", "properties": {"city": {"enum": ["Bern", "Basel"]}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": {**schema, "additionalProperties": False}}}
    constrained = litellm.completion(
        **ASKED, response_format=form, reasoning_effort="low", allowed_openai_params=["reasoning_effort"]
    )
    print(
        json.dumps(
            {
                "whole": whole.model_dump(),
                "texts": [choice.message.content for choice in many.choices],
                "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
                "rebuilt": rebuilt.model_dump(),
                "refused": refused,
                "embeddings": [each["embedding"] for each in embedded.data],
                "efforts": [each.choices[0].message.content for each in efforts],
                "image": shown,
                "constrained": json.loads(constrained.choices[0].message.content),
                "providers": {name: _ask_provider(name) for name in ("ollama_chat", "anthropic")},
            }
        )
    )


if __name__ == "__main__":
    main()
