"""Walks the grammar of tool calls token by token, with the grammar library that the engine uses."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import llguidance

from chatcache.decoding.grammar.compiler import _Vocabulary, to_lark
from chatcache.tokenizer.reply_format import ReplyFormat
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.tokenizer.tool_grammar import ToolChoice, build_tool_grammar
from chatcache.types.request import StructuredOutputs
from tests.support.fake_runner import fake_model_info

_CLOSING = ('"', "'", "}", "]", ")", '"}', '"]')


@cache
def _vocabulary(tokenizer: Tokenizer) -> Any:
    model_info = fake_model_info(tokenizer.vocab_size, tokenizer.eos_token_ids, 100)
    known = _Vocabulary(tokenizer.token_bytes, model_info, tokenizer.special_ids)
    return llguidance.LLTokenizer(known, eos_token=[known.eos_token_id])


def new_matcher(tokenizer: Tokenizer, choice: ToolChoice, form: ReplyFormat, prompt_end: str = "") -> Any:
    special = tokenizer.special_ids_of(form.marks(tools=True))
    grammar = build_tool_grammar(choice, form, special, prompt_end)
    lark = to_lark(StructuredOutputs(grammar=grammar, special_token_ids=tuple(special.values())))
    matcher = llguidance.LLMatcher(_vocabulary(tokenizer), lark, log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{lark}"
    return matcher


def walk(tokenizer: Tokenizer, matcher: Any, text: str) -> str:
    """Return "whole", "open" (more must follow) or "refused"."""
    for token in tokenizer.encode_after("", text):
        if not matcher.consume_token(token):
            return "refused"
    return "whole" if matcher.is_accepting() else "open"


def draw(tokenizer: Tokenizer, matcher: Any, form: ReplyFormat, rng: random.Random, num_steps: int) -> str | None:
    """Draw a random reply that the grammar allows; None if it does not end within the steps.

    Uniform draws would hardly ever write a delimiter, so delimiters are tried first now and then.
    """
    syntax = form.syntax
    delimiters = [tokenizer.encode_after("", text) for text in (*(syntax.delimiters if syntax else ()), *_CLOSING)]
    ids: list[int] = []
    stops = set(tokenizer.eos_token_ids)
    for step in range(num_steps):
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.5):
            return tokenizer.decode(ids, skip_special_tokens=False)
        wanted = rng.choice(delimiters)
        if rng.random() < 0.2 + step / num_steps and matcher.validate_tokens(wanted) == len(wanted):
            matcher.consume_tokens(wanted)
            ids += wanted
            continue
        mask = matcher.compute_bitmask()
        allowed = [k for k in range(tokenizer.vocab_size) if mask[k // 8] >> (k % 8) & 1 and k not in stops]
        printable = [k for k in allowed if tokenizer.token_bytes[k].isascii() and tokenizer.token_bytes[k].isalnum()]
        if not allowed:
            return tokenizer.decode(ids, skip_special_tokens=False) if matcher.is_accepting() else None
        token = rng.choice(printable if printable and rng.random() < 0.8 else allowed)
        assert matcher.consume_token(token)
        ids.append(token)
    return None
