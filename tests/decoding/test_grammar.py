"""Constrained candidates match the request, checked by jsonschema, `re`, lists and a hand-written parser."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.decoding.grammar.state import Constraint
from chatcache.decoding.stopping import StopRules
from chatcache.errors import InvalidRequestError
from chatcache.types.actions import Candidates
from chatcache.types.json_schema import FORMATS, close_objects, relax_schema, simplify_schema
from chatcache.types.request import SamplingParams, StructuredOutputs
from tests.decoding.decode_driver import Run, TableModel, log_softmax, run
from tests.decoding.toy_vocab import CONTROL, EOS, PIECES, PROMPT, VOCAB_SIZE, compiled, strategy_of, text_of

BYTE = {chr(byte): byte for byte in range(128)}
# Random logits would write for ever: close what is open, and prefer digits.
CLOSING = dict.fromkeys((*map(ord, '"}]e05'), PIECES.index(b'":'), EOS), 5.0)


def sample(
    outputs: StructuredOutputs,
    *,
    model: int = 0,
    shuffle: random.Random | None = None,
    max_tokens: int = 150,
    seed: int = 0,
    **fields: Any,
) -> Run:
    params = SamplingParams(structured_outputs=outputs, **fields)
    strategy = strategy_of(params, seed=seed, max_tokens=max_tokens)
    return run(strategy, PROMPT, TableModel(VOCAB_SIZE, model), shuffle=shuffle)


def texts(found: Run) -> list[str]:
    """The texts of the candidates that ended by themselves; all others must have run out of tokens."""
    finished = []
    for outcome in found.outcomes.values():
        assert outcome.done is not None and CONTROL not in outcome.tokens
        assert EOS not in outcome.tokens[:-1]
        if outcome.done.finish_reason == "stop":
            finished.append(text_of(outcome.tokens).decode())
    return finished


REGEXES = [
    r"\d{3}-[a-c]{2,5}",
    r"(ab|abc|bc)+x",
    r"é?日本*",
    r"[^a]{1,3}z",
    r"(yes|no)( ok)?",
    r"a/b\\\"",
    r"(?i)true|\n",
]


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_regex(regex: str, temperature: float) -> None:
    found = texts(sample(StructuredOutputs(regex=regex), n=12, temperature=temperature, logit_bias={EOS: 5.0}))
    assert len(found) >= 6
    for text in found:
        assert re.fullmatch(regex, text), text


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", None, 3]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: list[Any] = [
    PERSON,
    TREE,
    {"type": "array", "items": {"type": "number", "minimum": -2, "exclusiveMaximum": 10}, "minItems": 2, "maxItems": 4},
    {"type": "string", "pattern": "^[ab]{2,4}$"},
    {"const": {"k": [1, "é"]}},
    {"oneOf": [{"type": "integer", "minimum": 5, "maximum": 9}, {"type": "string", "maxLength": 2}]},
    {"type": ["null", "boolean"]},
    {"type": "string", "format": "date"},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:24])
@pytest.mark.slow
def test_json_schema(schema: Any) -> None:
    outputs = StructuredOutputs(json=json.dumps(schema))
    found = [text for model in range(2) for text in texts(sample(outputs, model=model, n=6, logit_bias=CLOSING))]
    assert len(found) >= 6
    for text in found:
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


A, B = {"properties": {"a": {"type": "null"}}}, {"properties": {"b": {"type": "null"}}}
CLOSED_A = {**A, "additionalProperties": False}
REF_A = {"$ref": "#/$defs/a"}


def closed(schema: Any) -> Any:
    parsed = json.loads(json.dumps(schema))
    close_objects(parsed)
    return parsed


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED_A),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"items": A, "$defs": {"unused": A}}, {"items": CLOSED_A, "$defs": {"unused": A}}),
        ({"prefixItems": [A]}, {"prefixItems": [CLOSED_A]}),
        ({"additionalProperties": A}, {"additionalProperties": CLOSED_A}),
        ({"anyOf": [A, REF_A], "$defs": {"a": A}}, {"anyOf": [CLOSED_A, REF_A], "$defs": {"a": CLOSED_A}}),
        (
            {"title": "x", "allOf": [REF_A], "$defs": {"a": A}},
            {"title": "x", "allOf": [REF_A], "$defs": {"a": CLOSED_A}},
        ),
        ({"allOf": [A, {"type": "object"}]}, {"allOf": [CLOSED_A, {"type": "object"}]}),
        (
            {**A, "anyOf": [{"required": ["a"]}, {"type": "null"}]},
            {**CLOSED_A, "anyOf": [{"required": ["a"]}, {"type": "null"}]},
        ),
    ],
)
def test_object_that_lists_its_keys_is_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        *({**A, word: value} for word, value in [("additionalProperties", True), ("unevaluatedProperties", True)]),
        *({**A, word: {}} for word in ("additionalProperties", "patternProperties", "propertyNames", "not", "if")),
        {**A, "minProperties": 2},
        {**A, "required": ["a", "b"]},
        {**A, "enum": [{"b": 1}]},
        {**A, "allOf": [B]},
        {**A, "anyOf": [B, {"required": ["a"]}]},
        {**A, "oneOf": [{"required": ["b"]}]},
        {"allOf": [A, B]},
        {"allOf": [A, {"required": ["b"]}]},
        {"required": ["b"], "anyOf": [A, B]},
        {"anyOf": [A, B], "oneOf": [A, B]},
        {"allOf": [{"properties": {"x": A}}, {"properties": {"x": B}}]},
        {"properties": {"x": A}, "patternProperties": {"x": B}},
        {"items": {"allOf": [REF_A, B]}, "$defs": {"a": A}},
        {"items": {**B, **REF_A}, "$defs": {"a": A}},
        {"allOf": [{"items": REF_A}, {"required": ["b"]}], "additionalProperties": REF_A, "$defs": {"a": A}},
        {"not": REF_A, "items": REF_A, "$defs": {"a": A}},
        {**A, "items": {"$ref": "https://example.org/other"}},
        {"allOf": [{"items": A}, {"items": B}]},
        {"items": B, "$ref": "#/$defs/list", "$defs": {"list": {"items": A}}},
        {"prefixItems": [A], "anyOf": [{"items": B}, {"type": "null"}]},
        {"properties": {"m": A}, "required": ["m"], "enum": [{"m": {"b": 1}}]},
        {"properties": {"m": A}, "const": {"m": {"b": 1}}},
        {**A, "required": [["a"], {}]},
        {**A, "properties": ["a"]},
        True,
    ],
)
def test_object_with_other_keys_stays_open(schema: Any) -> None:
    assert closed(schema) == schema


def schemas(objects: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas that combine other ones in each way that a model can be held to."""
    keys = st.sampled_from(["a", "b"])
    lists = st.lists(objects, min_size=1, max_size=2)
    words = {
        "properties": st.dictionaries(keys, objects, max_size=2),
        "required": st.lists(keys, unique=True),
        "additionalProperties": objects | st.booleans(),
        "items": objects,
        "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y"]),
        **dict.fromkeys(("allOf", "anyOf"), lists),
    }
    return st.fixed_dictionaries({}, optional=words)


SOME_SCHEMAS = st.recursive(st.sampled_from([A, B, {"type": "null"}, {"type": "object"}]), schemas, max_leaves=6)


@given(SOME_SCHEMAS, SOME_SCHEMAS, SOME_SCHEMAS)
@settings(deadline=None, max_examples=200)
def test_closing_objects_makes_no_schema_unsatisfiable(schema: Any, x: Any, y: Any) -> None:
    root = {"allOf": [schema], "$defs": {"x": x, "y": y}}
    assert is_compilable(closed(root)) or not is_compilable(root)


def is_compilable(schema: Any) -> bool:
    return not llguidance.LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}", None)


def simplified(schema: Any) -> Any:
    parsed = json.loads(json.dumps(schema))
    simplify_schema(parsed)
    return parsed


NULLS = {"type": "object", "properties": None, "required": None, "enum": None, "additionalProperties": None}
NAMES = {"propertyNames": {"type": "string"}, "format": {"type": "string"}}
VALUE = {"format": "path", "propertyNames": {"type": "string"}, "enum": None}
LOOK_AHEAD = {"type": "string", "pattern": "^(?!x)"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NULLS, {"type": "object"}),
        (
            {"anyOf": [NULLS], "$defs": {"a": NULLS}},
            {"anyOf": [{"type": "object"}], "$defs": {"a": {"type": "object"}}},
        ),
        ({"type": "object", **NAMES, "format": "x"}, {"type": "object"}),
        (
            {"title": "a", "properties": {"title": {"description": "b"}}},
            {"properties": {"title": {}}, "additionalProperties": False},
        ),
        ({"propertyNames": {"enum": ["a"], "format": "x"}}, {"propertyNames": {"enum": ["a"]}}),
        ({"properties": NAMES}, {"properties": NAMES, "additionalProperties": False}),
        ({"$defs": NAMES}, {"$defs": NAMES}),
        ({"type": "string", "format": "path"}, {"type": "string"}),
        ({"items": {"type": "integer", "format": "int64"}}, {"items": {"type": "integer"}}),
        ({"type": "string", "format": "uuid"}, {"type": "string", "format": "uuid"}),
        ({"const": None}, {"const": None}),
        *(({word: [VALUE]}, {word: [VALUE]}) for word in ("enum", "examples")),
        *(({word: VALUE}, {word: VALUE}) for word in ("const", "default")),
        (LOOK_AHEAD, LOOK_AHEAD),
        ({"items": LOOK_AHEAD, **relax_schema({})}, {"items": {"type": "string"}, **relax_schema({})}),
        ({"pattern": r"^\\bird$", **relax_schema({})}, {"pattern": r"^\\bird$", **relax_schema({})}),
        (True, True),
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_keywords_without_a_meaning_are_removed_and_values_kept(schema: Any, expected: Any) -> None:
    assert simplified(schema) == expected


def test_formats_are_those_that_the_library_enforces() -> None:
    known = {"idn-email", "idn-hostname", "uri-reference", "iri", "regex", "json-pointer", "base64", "path"} | FORMATS
    assert {name for name in known if is_compilable({"type": "string", "format": name})} == FORMATS


UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


@pytest.mark.parametrize(
    "schema", [UNIQUE, {"not": {"type": "string"}}, LOOK_AHEAD, {"type": "string", "pattern": r"\b"}]
)
def test_relaxed_schema_compiles_without_what_cannot_be_enforced(schema: Any) -> None:
    assert not is_compilable(simplified(schema))
    assert is_compilable(simplified(relax_schema(schema)))
    own = {"whitespace_pattern": ""}
    assert relax_schema({**schema, "x-guidance": own})["x-guidance"] == {"lenient": True, **own}


def test_json_schema_allows_the_listed_keys_only() -> None:
    outputs = StructuredOutputs(json=json.dumps({**A, "type": "object"}))
    found = texts(sample(outputs, n=12, logit_bias=CLOSING))
    assert found and {frozenset(json.loads(text)) for text in found} <= {frozenset(), frozenset("a")}


def test_json_object() -> None:
    found = texts(sample(StructuredOutputs(json_object=True), n=12, logit_bias=CLOSING))
    assert len(found) >= 6 and all(isinstance(json.loads(text), dict) for text in found)


def test_json_stands_on_one_line() -> None:
    """A model that wants nothing but spaces still has to go on."""
    spaces = {BYTE[" "]: 60.0, PIECES.index(b"  "): 60.0, BYTE["{"]: 50.0, BYTE["}"]: 40.0}
    (text,) = texts(sample(StructuredOutputs(json_object=True), logit_bias=spaces))
    assert text == "{ }"


CHOICES = ("yes", "no", "ab", "abc", 'é"日本\n', "abcab")


def test_choice() -> None:
    found = texts(sample(StructuredOutputs(choice=CHOICES), n=64, logit_bias=dict.fromkeys(map(ord, "ynaé"[:3]), 2.0)))
    assert set(found) <= set(CHOICES) and len(set(found)) >= 4


EXPRESSION = """
start: term ("+" term)*
term: NUMBER | "(" start ")"
NUMBER: /[0-9]{1,2}/
"""


def is_sum(text: str) -> bool:
    """Read `EXPRESSION` by recursive descent."""

    def whole(at: int) -> int:
        at = term(at)
        while text[at : at + 1] == "+":
            at = term(at + 1)
        return at

    def term(at: int) -> int:
        if text[at : at + 1] == "(":
            at = whole(at + 1)
            return at + 1 if text[at : at + 1] == ")" else 10**9
        digits = re.match(r"[0-9]{1,2}", text[at:])
        return at + len(digits[0]) if digits else 10**9

    return whole(0) == len(text)


def test_lark_grammar() -> None:
    bias = {EOS: 6.0, BYTE[")"]: 4.0, BYTE["("]: 2.0, BYTE["+"]: 3.0}
    found = [
        text
        for model in range(4)
        for text in texts(sample(StructuredOutputs(grammar=EXPRESSION), model=model, n=8, logit_bias=bias))
    ]
    assert len(found) >= 12 and any("(" in text for text in found) and any("+" in text for text in found)
    assert all(is_sum(text) for text in found)
    assert not is_sum("1+") and not is_sum("(1") and not is_sum("123") and is_sum("(1+22)+3")


@given(
    words=st.lists(st.text(alphabet="abcé", min_size=1, max_size=4), min_size=1, max_size=5, unique=True),
    walk=st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_masks_are_exactly_what_keeps_a_choice_in_reach(words: list[str], walk: random.Random) -> None:
    """EOS exactly where a choice is complete, every other token exactly where it begins a rest of one."""
    members = [word.encode() for word in words]
    constraint = Constraint(compiled(StructuredOutputs(choice=tuple(words))), StopRules(max_tokens=9, eos_ids=(EOS,)))
    guide, before, alive = constraint.fork(None), b"", True
    while alive:
        mask = constraint.mask(guide, 0)
        got = {token for token in range(VOCAB_SIZE) if int(mask[token // 32]) >> token % 32 & 1}
        ordinary = [token for token, piece in enumerate(PIECES) if piece and token not in (EOS, CONTROL)]
        want = {t for t in ordinary if any(member.startswith(before + PIECES[t]) for member in members)}
        assert got == want | ({EOS} if before in members else set())
        token = walk.choice(sorted(want))
        before += PIECES[token]
        alive = guide.consume(token)
        assert alive == any(member.startswith(before) and member != before for member in members)
    assert before in members


def test_forks_have_states_of_their_own() -> None:
    """Eight candidates in any order of progress, each as when all progress together, and as one alone."""
    outputs = StructuredOutputs(json=json.dumps(PERSON))
    together = sample(outputs, n=8, logit_bias=CLOSING, seed=3)
    for order in range(3):
        shuffled = sample(outputs, n=8, logit_bias=CLOSING, seed=3, shuffle=random.Random(order))
        assert shuffled.outcomes == together.outcomes
    assert sample(outputs, n=1, logit_bias=CLOSING, seed=3).outcomes[0] == together.outcomes[0]
    assert len({tuple(outcome.tokens) for outcome in together.outcomes.values()}) == 8


def test_mask_of_a_constrained_candidate_follows_its_grammar() -> None:
    strategy = strategy_of(SamplingParams(structured_outputs=StructuredOutputs(regex="abc")))
    assert strategy.draws(0)[0].mask is not None and not strategy.has_fixed_draws
    strategy.advance({0: (Candidates((BYTE["a"],), (-1.0,)),)})
    (spec,) = strategy.draws(0)
    assert strategy.has_fixed_draws and spec.next_changes is not None and spec.mask is not None
    assert np.array_equal(spec.next_changes()[1], spec.mask)
    strategy.advance({0: (Candidates((BYTE["b"],), (-1.0,)),)})
    following = strategy.draws(0)[0].mask
    assert following is not None and not np.array_equal(following, spec.mask)
    assert np.array_equal(spec.next_changes()[1], following)


def test_a_candidate_ends_when_nothing_may_follow_and_draws_no_eos_for_it() -> None:
    (outcome,) = sample(StructuredOutputs(regex="aa?b")).outcomes.values()
    assert outcome.done is not None and outcome.done.finish_reason == "stop" and outcome.done.stop_reason is None
    assert outcome.tokens[-1] != EOS and text_of(outcome.tokens) in (b"ab", b"aab")


def test_completing_at_max_tokens_is_a_stop() -> None:
    (outcome,) = sample(
        StructuredOutputs(choice=("é",)), max_tokens=1, logit_bias={PIECES.index("é".encode()): 99}
    ).outcomes.values()
    assert outcome.done is not None and outcome.done.finish_reason == "stop"
    cut = sample(StructuredOutputs(regex="1{9}"), max_tokens=2).outcomes[0]
    assert cut.done is not None and cut.done.finish_reason == "length"


def test_min_tokens_holds_back_the_end_until_nothing_else_is_left() -> None:
    wish = {EOS: 90.0}
    longer = sample(StructuredOutputs(regex="[12]{1,30}"), min_tokens=5, n=6, logit_bias=wish)
    assert {len(outcome.tokens) for outcome in longer.outcomes.values()} == {6}, "five tokens and EOS"
    done = sample(StructuredOutputs(choice=("1", "1212")), min_tokens=9, n=6, logit_bias=wish)
    assert set(texts(done)) == {"1212"}, "the grammar wins over min_tokens, but only where it has to"
    # A stop id that the grammar needs is held back only while there is another way.
    held = sample(
        StructuredOutputs(regex="[xy]+"), stop_token_ids=[BYTE["x"]], min_tokens=4, logit_bias={BYTE["x"]: 90.0}
    )
    assert text_of(held.outcomes[0].tokens) == b"yyyyx"
    forced = sample(StructuredOutputs(regex="xy"), stop_token_ids=[BYTE["x"]], min_tokens=4)
    assert text_of(forced.outcomes[0].tokens) == b"x"


def test_ignore_eos_goes_on_while_the_grammar_does() -> None:
    (outcome,) = sample(StructuredOutputs(regex="1{1,3}"), ignore_eos=True, logit_bias={EOS: 99.0}).outcomes.values()
    assert text_of(outcome.tokens) == b"111" and outcome.done is not None and outcome.done.finish_reason == "stop"
    (endless,) = sample(StructuredOutputs(regex="1*"), ignore_eos=True, max_tokens=20).outcomes.values()
    assert len(endless.tokens) == 20 and set(text_of(endless.tokens)) == set(b"1")


def test_a_control_token_may_end_a_candidate_but_never_be_its_text() -> None:
    """Its text, "{", is what the grammar wants; its bias is all it could wish for."""
    found = sample(StructuredOutputs(regex=r"\{+"), logit_bias={CONTROL: 99.0, EOS: -99.0}, max_tokens=6)
    assert CONTROL not in found.outcomes[0].tokens
    stop = sample(StructuredOutputs(regex=r"\{+"), logit_bias={CONTROL: 99.0}, stop_token_ids=[CONTROL])
    assert stop.outcomes[0].tokens[-1] == CONTROL and len(stop.outcomes[0].tokens) == 2
    for token in ("<[65]>", f"<[{CONTROL}]>", "<[*]>", "<eos>"):
        with pytest.raises(InvalidRequestError, match="names the token <"):
            sample(StructuredOutputs(grammar=f'start: {token} | "b"'))
    quoted = sample(StructuredOutputs(grammar='start: "<[65]>" | /<e>/'))
    assert text_of(quoted.outcomes[0].tokens) in (b"<[65]>", b"<e>")


def test_stop_strings_and_penalties_and_raw_logprobs() -> None:
    stopped = sample(StructuredOutputs(regex="[12]{30}"), stop=["21"], n=4)
    assert all(
        outcome.done is not None and outcome.done.stop_reason == "21" and b"21" in text_of(outcome.tokens)
        for outcome in stopped.outcomes.values()
    )
    penalised = sample(
        StructuredOutputs(regex="[a-z]{12}"), frequency_penalty=2.0, temperature=0.0, logit_bias={97: 9.0}
    )
    assert text_of(penalised.outcomes[0].tokens).count(b"a") < 8
    raw = sample(StructuredOutputs(regex="[12]{6}"), logprobs=2)
    model, tokens = TableModel(VOCAB_SIZE, 0), raw.outcomes[0].tokens
    for place, entry in enumerate(raw.outcomes[0].logprobs):
        values = log_softmax(model(PROMPT + tuple(tokens[:place])))
        assert entry.logprob == pytest.approx(float(values[tokens[place]]), abs=1e-5)
        assert [token for token, _ in entry.top] == np.argsort(-values, kind="stable")[:2].tolist()


def test_best_of_and_distinct_follow_too() -> None:
    best = sample(StructuredOutputs(choice=CHOICES), n=2, best_of=8)
    assert sorted(best.outcomes) == [0, 1] and set(texts(best)) <= set(CHOICES)
    distinct = sample(StructuredOutputs(regex="[ab]{3}"), n=12, distinct=True)
    tokens = [tuple(outcome.tokens) for outcome in distinct.outcomes.values()]
    assert len(set(tokens)) == 12 and all(re.fullmatch("[ab]{3}", text) for text in texts(distinct))
