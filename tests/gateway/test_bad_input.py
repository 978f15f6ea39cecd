"""Request parameters on both sides of their bounds; every error names its field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from chatcache.errors import InvalidRequestError
from chatcache.gateway.schemas.fields import MAX_INTEGRAL_FLOATS, parse_fields
from tests.gateway.serving import MAX_MODEL_LEN, Server, tiny_tokenizer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]
BIG = 2**31
VOCAB = tiny_tokenizer().vocab_size

# name, values just inside, values just outside or of the wrong type
BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("n", [1, 64], [0, 65, -1, 1.5, "1", True, [1]]),
    ("temperature", [0, 2], [-0.01, 2.01, "1", True, {}]),
    ("top_p", [0.001, 1], [0, 1.01, -1, "x"]),
    ("top_k", [-1, 0, VOCAB + 1, BIG - 1], [-2, BIG, 1.5]),
    ("min_p", [0, 1], [-0.1, 1.1, "x"]),
    ("repetition_penalty", [0.001, 10], [0, 1e-300, 10.1, -1]),
    ("presence_penalty", [-2, 2], [-2.1, 2.1]),
    ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
    ("seed", [-(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 1.5, "s"]),
    ("max_tokens", [1, 1.0, MAX_MODEL_LEN // 2], [0, 0.0, -1, BIG, 1.5, 1e300, "3"]),
    ("min_tokens", [0, 2], [-1, 3, BIG]),
    ("stop", ["x", ["x"] * 16, ["x" * 256]], ["", ["x"] * 17, ["x" * 257], [""], 3, [3]]),
    ("stop_token_ids", [[0, VOCAB - 1], [1] * 64, [0, 1.0]], [[-1], [VOCAB], [1.5], [1] * 65, ["1"], 1]),
    (
        "logit_bias",
        [{"0": -100, str(VOCAB - 1): 100}],
        [{"0": 101}, {"0": -101}, {"x": 1}, {str(VOCAB): 1}, {"-1": 1}, []],
    ),
    ("bad_words", [[], ["x", " a b"]], [[""], [" "], ["x"] * 65, ["x" * 257], [3], "x"]),
    ("allowed_token_ids", [[0], [1, VOCAB - 1]], [[], [-1], [VOCAB], ["1"], 1]),
    ("ignore_eos", [True, False], [1, "true"]),
    ("distinct", [True, False], [1, "yes"]),
    ("skip_special_tokens", [True, False], [0]),
    ("include_stop_str_in_output", [True, False], ["x"]),
    ("stream", [False], ["yes", 1]),
    ("stream_options", [{}], [[], "x"]),
    ("return_token_ids", [False], [2]),
]
CHAT_BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("max_completion_tokens", [1], [0, -1, BIG]),
    ("logprobs", [True, False], [1, "yes"]),
    ("messages", [USER * 3], [[], None, "hi", {}, [{}], [{"role": "user"}], [{"role": "robot", "content": "x"}], [1]]),
]
COMPLETION_BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("logprobs", [0, 20], [-1, 21, True]),
    ("echo", [True, False], [1]),
    (
        "prompt",
        ["x", ["x", "y"], [1, 2], [[1, 2], [3]], ["x", [1]]],
        [[], [-1], [VOCAB], [[]], [["x"]], [1, "x"], {}, None, 5, ["x"] * 65],
    ),
]
BEAM_BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("beam_width", [1, 4], [0, 65, "2"]),
    ("length_penalty", [-10, 10], [-10.1, 10.1]),
    ("early_stopping", [True, False, "never"], ["always", 2]),
    ("n", [1, 2], [3]),
    ("num_beam_groups", [1, 2], [0, 3, "2", 1.5]),
    ("diversity_penalty", [0], [0.5, -1, 101, "x"]),
    ("distinct", [False], [True, 1]),
    ("temperature", [0, 1], [0.5]),
    ("top_p", [1], [0.5]),
    ("presence_penalty", [-2, 2], [-2.1, 2.1]),
    ("bad_words", [["x"]], [[""], "x"]),
]
CASES = [
    *((CHAT, {"messages": USER, "max_tokens": 2}, *bounds) for bounds in BOUNDS + CHAT_BOUNDS),
    *((COMPLETIONS, {"prompt": "x", "max_tokens": 2}, *bounds) for bounds in BOUNDS + COMPLETION_BOUNDS),
    *((CHAT, {"messages": USER, "max_tokens": 2, "beam_width": 2}, *bounds) for bounds in BEAM_BOUNDS),
]


@pytest.mark.parametrize(
    ("path", "base", "name", "good", "bad"), CASES, ids=[f"{case[0].split('/')[2]}-{case[2]}" for case in CASES]
)
def test_parameter_at_its_bound_is_accepted_and_beyond_it_refused(
    server: Server, path: str, base: dict[str, Any], name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        status, _, answer = server.post(path, **{**base, name: value})
        assert status == 200, (value, answer)
    for value in bad:
        status, headers, answer = server.post(path, **{**base, name: value})
        assert status == 400, (value, answer)
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error" and isinstance(error["code"], str)
        assert (error["param"] or "").startswith(name), (value, error)
        assert name in error["message"] or "tool" in error["message"], error
        assert headers["x-request-id"]


class Inner(msgspec.Struct):
    """A nested object."""

    mode: Literal["f", "g"] = "f"


class Bounded(msgspec.Struct):
    """Fields with each kind of limit."""

    at_most: Annotated[float, msgspec.Meta(le=2)] = 0
    above: Annotated[float, msgspec.Meta(gt=0, lt=0.5)] = 0.1
    count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    names: Annotated[list[Annotated[str, msgspec.Meta(min_length=1, max_length=3)]], msgspec.Meta(max_length=2)] = []
    text: str | list[str] = ""
    entries: Annotated[dict[str, bool], msgspec.Meta(max_length=1)] = {}
    kind: Literal["a", "b"] = "a"
    mode: Literal["d", "e"] | None = None
    inner: Inner | None = None
    inners: list[Inner | None] | None = None
    counts: dict[str, int] = {}
    modes: Annotated[list[list[Literal["h", "i"] | bool]], msgspec.Meta(max_length=2)] = []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"at_most": 2.5}, "at_most must be at most 2"),
        ({"above": 0}, "above must be greater than 0"),
        ({"above": 0.5}, "above must be less than 0.5"),
        ({"count": 0}, "count must be at least 1"),
        ({"count": 0.0}, "count must be at least 1"),
        ({"count": 1.5}, "count must be an integer or null, got a number"),
        ({"count": -1e300}, "count must be an integer or null, got a number"),
        ({"text": 1.0}, "text must be a string or an array, got a number"),
        ({"counts": {"a": 1.0}}, "counts must be an integer, got a number"),
        ({"count": "x"}, "count must be an integer or null, got a string"),
        ({"names": ["a"] * 3}, "names must have at most 2 elements"),
        ({"names": [""]}, "names[0] must have at least 1 character"),
        ({"names": ["abcd"]}, "names[0] must have at most 3 characters"),
        ({"text": {}}, "text must be a string or an array, got an object"),
        ({"entries": {"a": True, "b": True}}, "entries must have at most 1 entry"),
        ({"kind": "c"}, "kind must be one of a, b, got 'c'"),
        ({"mode": "c"}, "mode must be one of d, e, got 'c'"),
        ({"inner": {"mode": "c"}}, "inner.mode must be one of f, g, got 'c'"),
        ({"inners": [None, {"mode": "c"}]}, "inners[1].mode must be one of f, g, got 'c'"),
        ({"modes": [[], ["h", "c"]]}, "modes[1][1] must be one of true, false, h, i, got 'c'"),
    ],
)
def test_error_of_a_field_names_the_limit_in_plain_words(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_fields(body, Bounded)
    assert (caught.value.message, caught.value.param) == (message, message.split()[0].rstrip(":"))


class Counts(msgspec.Struct):
    """Integers at every depth."""

    values: list[int | str]
    inner: list[Counts] = []


def test_integer_may_be_written_with_a_fraction_of_zero() -> None:
    body = {"values": [1.0, 2, "x", -0.0, 2.0**53], "inner": [{"values": [], "inner": [{"values": [3.0]}]}]}
    given = repr(body)
    parsed = parse_fields(body, Counts)
    assert repr(parsed.values) == f"[1, 2, 'x', 0, {2**53}]"
    assert repr(parsed.inner[0].inner[0].values) == "[3]"
    assert repr(body) == given


def test_number_of_integers_with_a_fraction_of_zero_is_limited() -> None:
    """Each repeats the conversion, and a body can have a million."""
    assert len(parse_fields({"values": [1.0] * MAX_INTEGRAL_FLOATS}, Counts).values) == MAX_INTEGRAL_FLOATS
    with pytest.raises(InvalidRequestError, match=r"values\[16\] must be an integer or a string, got a number"):
        parse_fields({"values": [1.0] * (MAX_INTEGRAL_FLOATS + 1)}, Counts)


@pytest.mark.parametrize("limit", ["0", "101", "-1", "1.5", "x", "000000001" + "9" * 20, "000000001" + "9" * 5000])
def test_limit_of_a_list_out_of_its_bounds_is_refused(server: Server, limit: str) -> None:
    status, _, answer = server.request("GET", f"/v1/conversations?limit={limit}")
    assert (status, answer["error"]["param"]) == (400, "limit")
    assert answer["error"]["message"] == "limit must be between 1 and 100"


def test_response_without_input_is_refused_as_a_missing_parameter(server: Server) -> None:
    without_input: list[dict[str, Any]] = [{}, {"input": []}]
    for body in without_input:
        status, _, answer = server.post("/v1/responses", **body)
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, "missing_required_parameter", "input")
        assert error["message"] == "input is required"


def test_temperature_of_beam_search_is_refused_with_the_accepted_values(server: Server) -> None:
    status, _, answer = server.post(CHAT, messages=USER, beam_width=2, temperature=0.7)
    assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
    assert answer["error"]["message"] == "temperature has no effect in beam search: leave it out, or send 0 or 1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("modalities", ["audio"]),
        ("logits_processors", ["x"]),
        ("guided_json", {}),
        ("add_generation_prompt", False),
        ("chat_template", "x"),
        ("diversity_penalty", 0.5),
        ("num_beam_groups", 2),
        ("stream_beams", True),
    ],
)
def test_unsupported_field_is_refused_by_its_name(server: Server, field: str, value: object) -> None:
    status, _, answer = server.post(CHAT, messages=USER, **{field: value})
    assert status == 400
    assert (answer["error"]["code"], answer["error"]["param"]) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("guided_json", {"type": "object"}, "json"),
        ("guided_regex", "a+", "regex"),
        ("guided_choice", ["a", "b"], "choice"),
        ("guided_grammar", 'start: "a"', "grammar"),
        ("functions", [{"name": "f"}], "tools"),
        ("function_call", {"name": "f"}, "tool_choice"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_field_of_another_server_is_refused_with_its_equivalent(
    server: Server, path: str, field: str, value: object, hint: str
) -> None:
    prompt = {"messages": USER} if path == CHAT else {"prompt": "Hi"}
    status, _, answer = server.post(path, **prompt, max_tokens=1, **{field: value})
    assert status == 400
    error = answer["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)
    assert hint in error["message"].partition("; send ")[2]
    if field.startswith("guided_"):
        own = {"structured_outputs": {hint: value}}
        assert server.post(path, **prompt, max_tokens=1, **own)[0] == 200


def test_neutral_value_of_an_unsupported_field_is_accepted(server: Server) -> None:
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1, "priority": 0}
    status, headers, _ = server.post(CHAT, messages=USER, max_tokens=1, temperature=None, **neutral)
    assert status == 200 and "x-chatcache-ignored" not in headers


def test_field_without_effect_is_named_unless_it_has_its_default(server: Server) -> None:
    fields = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "flex",
        "user": "u",
        "safety_identifier": "s",
        "prediction": {"type": "content", "content": "x"},
    }
    status, headers, _ = server.post(CHAT, messages=USER, max_tokens=1, **fields)
    assert (status, headers["x-chatcache-ignored"]) == (200, ", ".join(fields))
    defaults = {"store": False, "metadata": {}, "service_tier": "auto", "user": None}
    status, headers, _ = server.post(CHAT, messages=USER, max_tokens=1, **defaults)
    assert status == 200 and "x-chatcache-ignored" not in headers


def test_unknown_fields_are_listed_in_a_header_without_injection(server: Server) -> None:
    odd = {"frobnicate": 1, "a\r\nx-evil: 1": 2, "ünïcode": 3, "ok_2": 4}
    status, headers, _ = server.post(CHAT, messages=USER, max_tokens=1, **odd)
    assert status == 200
    assert headers["x-chatcache-ignored"] == "frobnicate, ok_2, +2"
    assert "x-evil" not in headers


def test_prompt_over_the_context_length_is_a_400_with_the_lengths(server: Server) -> None:
    long = [{"role": "user", "content": "wood " * 3000}]
    status, _, answer = server.post(CHAT, messages=long)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["param"] == "messages"
    assert str(MAX_MODEL_LEN) in answer["error"]["message"]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages[0].content[0].type"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        (5, "messages[0].content"),
    ],
)
def test_invalid_content_part_is_refused_by_its_field(server: Server, content: object, param: str) -> None:
    status, _, answer = server.post(CHAT, messages=[{"role": "user", "content": content}])
    assert status == 400 and answer["error"]["param"] == param


def test_text_parts_are_joined(server: Server) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]
    one = server.post(CHAT, messages=[{"role": "user", "content": parts}], max_tokens=4, temperature=0)[2]
    two = server.post(CHAT, messages=[{"role": "user", "content": "Hello\nyou"}], max_tokens=4, temperature=0)[2]
    assert one["choices"][0]["message"] == two["choices"][0]["message"]
