"""`LLM.chat` with tools: the prompt and the parsed calls are those of the gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatcache import LLM, SamplingParams
from chatcache.errors import InvalidRequestError, UnsupportedParameterError
from tests.llm.tiny_llama import TEMPLATE, write_folder

SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "lamp", "description": "switch it", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]
CHAT = [{"role": "user", "content": "Hi"}]
PARAMS = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=120)
TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + TEMPLATE.replace(
    "{{ m.content }}", "{{ m.name }}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
)


@pytest.fixture(scope="module")
def llm_tools(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The tiny model with a chat template in the manner of Hermes, and a context that holds it."""
    folder: Path = tmp_path_factory.mktemp("tools")
    write_folder(folder, oracle)
    for name, field, value in (
        ("config.json", "max_position_embeddings", 1024),
        ("tokenizer_config.json", "chat_template", TOOLS_TEMPLATE),
    ):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, field: value}))
    with LLM(str(folder), dtype="float32", attention_backend="reference", kv_memory="4MiB") as llm:
        yield llm


def test_chat_required_tool_returns_parsed_calls_without_their_text(llm_tools: LLM) -> None:
    choice = {"type": "function", "function": {"name": "lamp"}}
    (output,) = llm_tools.chat(CHAT, PARAMS, use_tqdm=False, tools=TOOLS, tool_choice=choice)
    tokenizer = llm_tools.get_tokenizer()
    assert output.error is None and len(output.outputs) == 3
    for candidate in output.outputs:
        (call,) = candidate.tool_calls
        assert call.name == "lamp" and set(json.loads(call.arguments)) == {"on"} and call.call_id
        assert candidate.text == "" and candidate.finish_reason == "stop"
        assert "<tool_call>" in tokenizer.decode(candidate.token_ids)
    assert len({call.call_id for each in output.outputs for call in each.tool_calls}) == 3


def test_chat_prompt_declares_the_tools_as_the_gateway_does(llm_tools: LLM) -> None:
    (output,) = llm_tools.chat(CHAT, SamplingParams(max_tokens=1), use_tqdm=False, tools=TOOLS)
    assert output.prompt is not None and output.prompt.endswith("<tool_call>[user]Hi[bot]")
    declared = json.loads(output.prompt[: output.prompt.index("<tool_call>")])
    assert declared[0] == TOOLS[0]
    assert declared[1] == {
        "type": "function",
        "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
    }
    assert output.outputs[0].tool_calls == ()


def test_chat_results_of_calls_are_rendered_with_the_function_name(llm_tools: LLM) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "lamp", "arguments": '{"on":  true}'}}
    messages: list[dict[str, Any]] = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    (output,) = llm_tools.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, tools=TOOLS)
    assert output.prompt is not None and '"arguments": {"on":  true}' in output.prompt
    assert output.prompt.endswith("[tool]lampdone[bot]")
    unknown = [*messages[:2], {**messages[2], "tool_call_id": "c2"}]
    ok, failed = llm_tools.chat([messages, unknown], SamplingParams(max_tokens=1), use_tqdm=False, tools=TOOLS)
    assert ok.error is None and failed.error is not None and "c2" in failed.error.message


def test_chat_invalid_tools_are_an_error_of_the_call(llm_tools: LLM, llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="lamp2"):
        llm_tools.chat(CHAT, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "lamp2"}})
    with pytest.raises(InvalidRequestError, match="tools"):
        llm_tools.chat(CHAT, tools=[{"function": 3}])
    with pytest.raises(UnsupportedParameterError, match="does not support"):
        llm.chat(CHAT, tools=TOOLS)
