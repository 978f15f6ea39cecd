"""Structured outputs end to end, with the demo model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from chatcache import LLM, BeamSearchParams, SamplingParams
from chatcache.errors import InvalidRequestError
from chatcache.types.request import StructuredOutputs


@pytest.fixture(scope="module")
def builtin() -> Iterator[LLM]:
    with LLM(max_model_len=512, kv_memory="32MiB") as llm:
        yield llm


def test_a_schema_reply_parses(builtin: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        n=4, seed=1, temperature=0.7, max_tokens=150, structured_outputs=StructuredOutputs(json=json.dumps(schema))
    )
    (output,) = builtin.chat([{"role": "user", "content": "Who are you?"}], params, use_tqdm=False)
    finished = [candidate for candidate in output.outputs if candidate.finish_reason == "stop"]
    assert len(finished) >= 3
    for candidate in finished:
        person = json.loads(candidate.text)
        assert set(person) == {"name", "age"} and isinstance(person["name"], str) and person["age"] <= 150


def test_choices_regexes_and_beams(builtin: LLM) -> None:
    choices = ("yes", "no", "perhaps not")
    beams = BeamSearchParams(beam_width=3, max_tokens=12, structured_outputs=StructuredOutputs(choice=choices))
    (found,) = builtin.beam_search(["Is the sky blue?"], beams)
    assert all(candidate.text in choices for candidate in found.outputs)
    regex = r"\d{4}-\d\d (AM|PM)"
    params = SamplingParams(n=8, max_tokens=20, structured_outputs=StructuredOutputs(regex=regex))
    (drawn,) = builtin.generate(["The time is"], params, use_tqdm=False)
    assert all(re.fullmatch(regex, candidate.text) for candidate in drawn.outputs)


def test_structured_outputs_as_a_dict_are_the_object(builtin: LLM) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    assert (
        SamplingParams(structured_outputs={"json": schema}).structured_outputs  # type: ignore[arg-type]
        == StructuredOutputs(json=schema)  # type: ignore[arg-type]
        == StructuredOutputs(json=json.dumps(schema))
    )
    params = SamplingParams(structured_outputs={"choice": ["a", "b"]})  # type: ignore[arg-type]
    (output,) = builtin.generate(["x"], params, use_tqdm=False)
    assert output.outputs[0].text in ("a", "b")
    with pytest.raises(
        InvalidRequestError, match="no field 'choices'; its fields are json, json_object, regex, choice"
    ):
        BeamSearchParams(structured_outputs={"choices": ["a"]})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.json is not JSON: Object of type set"):
        BeamSearchParams(structured_outputs={"json": {"enum": {1}}})  # type: ignore[arg-type]


def test_generate_invalid_grammar_is_the_error_of_its_output(builtin: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="(a"))
    (failed,) = builtin.generate(["x"], params, use_tqdm=False)
    assert isinstance(failed.error, InvalidRequestError) and "unclosed group" in failed.error.message
    assert failed.error.param == "structured_outputs"
    (after,) = builtin.generate(["x"], SamplingParams(max_tokens=1), use_tqdm=False)
    assert after.outputs[0].token_ids
