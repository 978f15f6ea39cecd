"""Run by the frameworks' own environment: openai-agents against the server; prints what came as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import agents  # type: ignore[import-not-found,unused-ignore]  # lives in an environment of its own
import openai
import pydantic

MODEL = os.environ["MODEL"]
CLIENT = openai.AsyncOpenAI(base_url=f"{os.environ['SERVER']}/v1", api_key="unused", max_retries=0)
SETTINGS = agents.ModelSettings(max_tokens=300)


class City(pydantic.BaseModel):
    city: str
    people: int


@agents.function_tool  # type: ignore[untyped-decorator,unused-ignore]
def weather(city: str) -> str:
    """Describe the weather of a city."""
    return f"sunny-in-{city}"


def agent(*, chat: bool = False, **fields: Any) -> Any:
    kind = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
    fields = {"name": "Helper", "instructions": "Be kind.", "model_settings": SETTINGS, **fields}
    return agents.Agent(model=kind(model=MODEL, openai_client=CLIENT), **fields)


def result_of(result: Any) -> dict[str, Any]:
    return {
        "output": result.final_output,
        "items": [item.type for item in result.new_items],
        "cached": [response.usage.input_tokens_details.cached_tokens for response in result.raw_responses],
        "inputs": [response.usage.input_tokens for response in result.raw_responses],
    }


async def tool(chat: bool = False) -> Any:
    return result_of(await agents.Runner.run(agent(chat=chat, tools=[weather]), "Weather in Bern?"))


async def chat_tool() -> Any:
    return await tool(chat=True)


async def streamed() -> Any:
    result = agents.Runner.run_streamed(agent(tools=[weather]), "Weather in Bern?")
    deltas = []
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            deltas.append(event.data.delta)
    return {**result_of(result), "deltas": "".join(deltas)}


async def chat_streamed() -> Any:
    result = agents.Runner.run_streamed(agent(chat=True), "Hello")
    deltas = []
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            deltas.append(event.data.delta)
    return {**result_of(result), "deltas": "".join(deltas)}


async def structured() -> Any:
    outputs = [
        (await agents.Runner.run(agent(chat=chat, output_type=City), "Name a city as JSON")).final_output
        for chat in (False, True)
    ]
    return [output.model_dump() for output in outputs if isinstance(output, City)]


async def handoff() -> Any:
    specialist = agent(name="Specialist", instructions="You are the specialist.", handoff_description="Knows it")
    result = await agents.Runner.run(agent(handoffs=[specialist]), "Ask the specialist")
    return {**result_of(result), "last": result.last_agent.name}


async def session() -> Any:
    memory = agents.SQLiteSession("one")
    first = await agents.Runner.run(agent(), "Hello there", session=memory)
    second = await agents.Runner.run(agent(), "And again", session=memory)
    return [result_of(first), result_of(second)]


async def previous() -> Any:
    first = await agents.Runner.run(agent(), "Hello there")
    second = await agents.Runner.run(agent(), "And again", previous_response_id=first.last_response_id)
    return [result_of(first), result_of(second)]


async def effort() -> Any:
    settings = agents.ModelSettings(max_tokens=300, reasoning=openai.types.Reasoning(effort="low"), verbosity="low")
    return result_of(await agents.Runner.run(agent(model_settings=settings), "Hello"))


async def hosted() -> Any:
    """A hosted tool is skipped and named; the run continues without it."""
    result = await agents.Runner.run(agent(tools=[agents.WebSearchTool(), weather]), "Hello")
    return result_of(result)


async def image() -> Any:
    part = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"}
    try:
        await agents.Runner.run(agent(), [{"role": "user", "content": [part]}])
    except openai.BadRequestError as error:
        return {"code": error.code, "message": error.message}


SCENARIOS = (
    *(tool, chat_tool, streamed, chat_streamed, structured, handoff, session, previous, effort, hosted, image),
)


async def main() -> None:
    agents.set_tracing_disabled(True)
    found: dict[str, Any] = {}
    for scenario in SCENARIOS:
        try:
            found[scenario.__name__] = await scenario()
        except Exception as error:
            found[scenario.__name__] = {"raised": f"{type(error).__name__}: {error}"}
    await CLIENT.close()
    json.dump(found, sys.stdout)


asyncio.run(main())
