"""Run by the environment of the frameworks: asks the demo model with tools, and prints what came as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import instructor  # type: ignore[import-not-found,unused-ignore]  # these live in an environment of their own
import openai
from agents import (  # type: ignore[import-not-found,unused-ignore]
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

URL, MODEL = f"{os.environ['SERVER']}/v1", os.environ["MODEL"]


class User(BaseModel):
    name: str
    age: int


def run_agent(kind: Any) -> dict[str, Any]:
    """Let an agent answer a question with a function."""
    cities: list[str] = []

    @function_tool  # type: ignore[untyped-decorator,unused-ignore]
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        cities.append(city)
        return f"The weather in {city} is sunny."

    agent = Agent(
        name="Assistant",
        instructions="You are a helpful assistant.",
        model=kind(model=MODEL, openai_client=openai.AsyncOpenAI(base_url=URL, api_key="unused", max_retries=0)),
        model_settings=ModelSettings(temperature=0),
        tools=[get_weather],
    )
    return {"answer": Runner.run_sync(agent, "What's the weather in Vienna?").final_output, "called_with": cities}


def extract(mode: Any) -> dict[str, Any]:
    """Let instructor read a name and an age from a sentence."""
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="unused", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "Extract Jason is 25 years old."}]
    user: User = client.chat.completions.create(
        model=MODEL, response_model=User, messages=messages, temperature=0, max_tokens=200, max_retries=1
    )
    return user.model_dump()


def main() -> None:
    set_tracing_disabled(True)
    agents = {"chat": run_agent(OpenAIChatCompletionsModel), "responses": run_agent(OpenAIResponsesModel)}
    modes = (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA)
    print(json.dumps({"agents": agents, "instructor": {mode.name: extract(mode) for mode in modes}}))


if __name__ == "__main__":
    main()
