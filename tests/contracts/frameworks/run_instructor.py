"""Run by the frameworks' own environment: instructor against the server; prints what came as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import instructor  # type: ignore[import-not-found,unused-ignore]  # lives in an environment of its own
import openai
import pydantic

CLIENT = openai.OpenAI(base_url=f"{os.environ['SERVER']}/v1", api_key="unused", max_retries=0)
USER: Any = [{"role": "user", "content": "Name a city"}]


class City(pydantic.BaseModel):
    city: str
    people: int

    @pydantic.field_validator("people")
    @classmethod
    def is_positive(cls, people: int) -> int:
        if people < 0:
            raise ValueError("people-must-be-positive")
        return people


def ask(mode: Any, **fields: Any) -> Any:
    client = instructor.from_openai(CLIENT, mode=mode)
    asked = {"model": os.environ["MODEL"], "messages": USER, "response_model": City, "max_retries": 0, **fields}
    if mode in (instructor.Mode.RESPONSES_TOOLS,):
        return client.chat.completions.create(**asked)
    return client.chat.completions.create(max_tokens=300, **asked)


def streamed() -> Any:
    client = instructor.from_openai(CLIENT, mode=instructor.Mode.TOOLS)
    parts = list(
        client.chat.completions.create_partial(
            model=os.environ["MODEL"], messages=USER, response_model=City, max_tokens=300
        )
    )
    return {"number": len(parts), "last": parts[-1].model_dump()}


def image() -> Any:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    try:
        ask(instructor.Mode.TOOLS, messages=[{"role": "user", "content": [part]}])
    except Exception as error:
        cause: Any = error
        while cause is not None and not isinstance(cause, openai.BadRequestError):
            cause = cause.__cause__ or cause.__context__
        return {"raised": str(error), "code": getattr(cause, "code", None)}


def main() -> None:
    retried = [{"role": "user", "content": "Name a negative city, " + "please " * 200}]
    modes = instructor.Mode
    scenarios = {
        "tools": lambda: ask(modes.TOOLS).model_dump(),
        "json": lambda: ask(modes.JSON).model_dump(),
        "json_schema": lambda: ask(modes.JSON_SCHEMA).model_dump(),
        "md_json": lambda: ask(modes.MD_JSON).model_dump(),
        "responses_tools": lambda: ask(modes.RESPONSES_TOOLS).model_dump(),
        "retried": lambda: ask(modes.TOOLS, messages=retried, max_retries=2).model_dump(),
        "streamed": streamed,
        "image": image,
    }
    found: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        try:
            found[name] = scenario()
        except Exception as error:
            found[name] = {"raised": f"{type(error).__name__}: {error}"}
    json.dump(found, sys.stdout)


main()
