"""Dialogues with functions: rendered like a client's request, correct, append-only, and without held-out values."""

import itertools
import json
import re
from random import Random
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer

from chatcache.demo_model import model_path
from chatcache.demo_model.training import tool_dialogues, tools
from chatcache.demo_model.training.corpus import END, IGNORED, START, Dialogue, Encoder, render, stream
from chatcache.demo_model.training.wording import held_out
from chatcache.tokenizer.chat_template import ChatTemplate, parse_arguments

PLAIN = (  # the template before it knew functions
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "How is the weather in Zürich?"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def template(tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer.chat_template, origin="demo model", variables={})


def request_of(offers: list[tools.Offer], task: tools.Task, system: str) -> tuple[list[Any], list[Any]]:
    """The messages and functions as the gateway passes them to the template."""
    name = offers[0].tool.name
    arguments = [parse_arguments(json.dumps(given, ensure_ascii=False)) for given in task.calls]
    calls = [{"type": "function", "function": {"name": name, "arguments": given}} for given in arguments]
    messages = [
        *([{"role": "system", "content": system}] if system else []),
        {"role": "user", "content": task.user},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": result} for result in task.results),
        {"role": "assistant", "content": task.answer},
    ]
    return messages, [offer.tool.schema() for offer in offers]


def drawn(seed: int) -> tuple[list[tools.Offer], tools.Task, str]:
    rng = Random(seed)
    offers = tool_dialogues.offers(rng, rng.choice((1, 2, 3)))
    return offers, offers[0].ask(rng, False), rng.choice(("", "You are a helpful assistant."))


@pytest.mark.parametrize("generate", [False, True])
def test_prompts_without_functions_are_rendered_as_before(template: ChatTemplate, generate: bool) -> None:
    before = ChatTemplate(PLAIN, origin="test", variables={})
    for dialogue in itertools.islice(stream(8, long_share=0.05), 200):
        for functions in (None, list[Any]()):
            ours = template.render(dialogue, add_generation_prompt=generate, tools=functions)
            assert ours == before.render(dialogue, add_generation_prompt=generate)
    assert template.render([]) == before.render([])


def test_requests_with_functions_are_rendered_as_in_training(template: ChatTemplate, tokenizer: Any) -> None:
    for seed in range(200):
        offers, task, system = drawn(seed)
        expected = render(
            tool_dialogues.declare(system, offers)
            + tool_dialogues.called(offers[0].tool, task)
            + tool_dialogues.answered(task)
        )
        messages, functions = request_of(offers, task, system)
        assert template.render(messages, add_generation_prompt=False, tools=functions) == expected
        if seed < 20:
            assert tokenizer.apply_chat_template(messages, tools=functions, tokenize=False) == expected


def test_longer_histories_with_functions_begin_with_the_shorter_ones(template: ChatTemplate) -> None:
    for seed in range(50):
        messages, functions = request_of(*drawn(seed))
        texts = [template.render(messages[:count], tools=functions) for count in range(1, len(messages) + 1)]
        texts = [text.removesuffix(f"{START}assistant\n") for text in texts[messages[0]["role"] == "system" :]]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_a_system_prompt_is_rendered_alike_with_and_without_functions(template: ChatTemplate) -> None:
    functions = [offer.tool.schema() for offer in tool_dialogues.offers(Random(0), 2)]
    alone = template.render([SYSTEM], add_generation_prompt=False)
    assert template.render([SYSTEM, USER], tools=functions).startswith(alone)
    assert template.render([SYSTEM, USER]).startswith(alone)


def test_schemas_are_rendered_in_the_form_of_a_call(template: ChatTemplate) -> None:
    properties = {
        "city": {"type": "string", "description": "left out"},
        "unit": {"enum": ["c", 5], "type": "string"},
        "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "items": {"type": "array", "items": {"type": "number"}},
        "keys": {"type": ["string", "null"]},
        "other": {"$ref": "#/$defs/Other"},
        "more": {"type": "object", "properties": {"deep": {"type": "string"}}},
    }
    schema = {"type": "object", "properties": properties, "required": ["city", "days"], "additionalProperties": False}
    functions = [
        {"type": "function", "function": {"name": "weather", "description": " How\nit is ", "parameters": schema}},
        {"type": "function", "function": {"name": "now"}},
        {"type": "function", "function": {"name": "empty", "description": "", "parameters": {"type": "object"}}},
    ]
    text = template.render([USER], tools=functions)
    assert text == (
        f"{START}tools\n"
        '{"name": "weather", "arguments": {"city": string, "unit"?: "c"|5, "days": integer|null, '
        '"items"?: [number], "keys"?: string|null, "other"?: any, "more"?: object}} How\nit is\n'
        '{"name": "now", "arguments": {}}\n'
        f'{{"name": "empty", "arguments": {{}}}}{END}\n'
        f"{START}user\nHow is the weather in Zürich?{END}\n{START}assistant\n"
    )


def test_text_comes_before_a_call_and_arguments_keep_their_form(template: ChatTemplate) -> None:
    for arguments, expected in (('{"a":1,  "b": "é"}', '{"a":1,  "b": "é"}'), ("not json", "not json")):
        call = {"function": {"name": "f", "arguments": parse_arguments(arguments)}}
        message = {"role": "assistant", "content": "Wait.", "tool_calls": [call, call]}
        written = f'\n<tool_call>\n{{"name": "f", "arguments": {expected}}}\n</tool_call>'
        assert template.render([message], add_generation_prompt=False) == (
            f"{START}assistant\nWait.{written}{written}{END}\n"
        )


def test_a_function_of_the_usual_form_takes_few_tokens(tokenizer: Any) -> None:
    properties = {
        "location": {"type": "string", "description": "City and country, for example Bogotá, Colombia"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "The unit of the temperature."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["location", "unit"]}
    function = {
        "name": "get_weather",
        "description": "Get current temperature for a given location.",
        "parameters": {**parameters, "additionalProperties": False},
        "strict": True,
    }
    functions = [{"type": "function", "function": function}]
    chat = [{"role": "user", "content": "Hi"}]
    with_tools, without = (
        tokenizer.apply_chat_template(chat, tools=given, tokenize=True)["input_ids"] for given in (functions, None)
    )
    assert len(with_tools) - len(without) < 100 < len(tokenizer(json.dumps(functions)).input_ids) / 2


def calls_of(dialogue: Dialogue) -> list[dict[str, Any]]:
    return [
        json.loads(text)
        for message in dialogue
        if message["role"] == "assistant"
        for text in re.findall(r"<tool_call>\n(.*)\n</tool_call>", message["content"])
    ]


def test_calls_name_a_declared_function_and_copy_their_arguments() -> None:
    seen = 0
    for dialogue in itertools.islice(stream(11, tool_share=1.0), 500):
        declared = "".join(message["content"] for message in dialogue if message["role"] == "tools")
        asked = "".join(message["content"] for message in dialogue if message["role"] == "user")
        for call in calls_of(dialogue):
            assert set(call) == {"name", "arguments"} and f'{{"name": "{call["name"]}", ' in declared
            for key, value in call["arguments"].items():
                assert f'"{key}"' in declared
                words = re.findall(r"\w+", str(value))
                assert all(word in asked or f'"{word}"' in declared for word in words)
            seen += 1
    assert seen > 500


def test_no_held_out_function_or_value_is_in_the_training_dialogues() -> None:
    names: set[str] = set()
    cities: set[str] = set()
    for dialogue in itertools.islice(stream(12, tool_share=1.0), 1500):
        for call in calls_of(dialogue):
            names.add(call["name"])
            cities.update(str(value) for key, value in call["arguments"].items() if key in ("city", "location", "town"))
    assert len(names) > 300 and len(cities) > 200
    singles = {"add", "sum", "plus", "subtract", "minus", "multiply", "times", "divide", "division", "product"}
    assert not [name for name in names - singles - {"difference", "quotient"} if held_out("function", name)]
    assert not [
        city for city in cities if city.istitle() and city.isalpha() and city.isascii() and held_out("city", city)
    ]
    for seed in range(30):
        offers = tool_dialogues.offers(Random(seed), 3, held=True)
        assert all(held_out("function", offer.tool.name) for offer in offers)


def test_targets_include_calls_and_exclude_functions_and_results() -> None:
    raw = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    dialogues = list(itertools.islice(stream(13, tool_share=1.0), 50))
    for dialogue, (_, targets) in zip(dialogues, Encoder(raw).encode(dialogues), strict=True):
        spoken = raw.decode(targets[targets != IGNORED].tolist(), skip_special_tokens=False)
        assert spoken == "".join(m["content"] + END for m in dialogue if m["role"] == "assistant")


def test_tool_dialogues_join_others_by_their_share() -> None:
    def count(**shares: float) -> int:
        dialogues = itertools.islice(stream(14, **shares), 400)
        return sum(any(message["role"] == "tools" for message in dialogue) for dialogue in dialogues)

    assert count() == 0 and count(long_share=0.3) == 0
    assert 100 < count(tool_share=0.4) < 220
