"""A vocabulary small enough to enumerate: every byte, some longer pieces, control tokens that look like text."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from chatcache.decoding.grammar.compiler import GrammarCompiler, GrammarFuture
from chatcache.decoding.strategy import make_strategy
from chatcache.types.actions import Strategy
from chatcache.types.request import GenerateRequest, Params, StructuredOutputs
from chatcache.types.stats import ModelInfo

EOS, CONTROL = 256, 257  # <eos>; a control token whose text is "{"
LONGER = ('{"', '":', '", "', "true", "ab", "abc", "bc", "aa", "12", "é", "日本", '"a"', "}", "  ", "ab")
PIECES = (*(bytes([byte]) for byte in range(256)), b"<eos>", b"{", b"", *(text.encode() for text in LONGER))
VOCAB_SIZE = 288  # a model's logits may be wider than its tokenizer
PROMPT = (65, 66)


def model_info_of(vocab_size: int = VOCAB_SIZE, eos: tuple[int, ...] = (EOS,)) -> ModelInfo:
    return ModelInfo(name="toy", digest="00", vocab_size=vocab_size, max_model_len=9999, eos_token_ids=eos)


MODEL_INFO = model_info_of()


@functools.cache
def grammars() -> GrammarCompiler:
    """One set of compiled grammars for all tests that do not break it."""
    return GrammarCompiler(PIECES, MODEL_INFO, (EOS, CONTROL))


def text_of(tokens: Sequence[int]) -> bytes:
    """What the tokens add to the text, as a reader sees it."""
    return b"".join(PIECES[token] for token in tokens if token not in (EOS, CONTROL))


def compiled(outputs: StructuredOutputs, within: GrammarCompiler | None = None) -> GrammarFuture:
    """A grammar_future that is ready. Raises: what compiling raises."""
    grammar_future = (within or grammars()).start(outputs)
    grammar_future.future.result(120)
    return grammar_future


def strategy_of(
    params: Params,
    *,
    seed: int = 0,
    max_tokens: int = 40,
    within: GrammarCompiler | None = None,
    model_info: ModelInfo = MODEL_INFO,
) -> Strategy:
    """The strategy of a constrained request."""
    request = GenerateRequest(request_id="r", prompt=PROMPT, params=params)
    grammar_future = compiled(params.structured_outputs, within) if params.structured_outputs is not None else None
    return make_strategy(
        request,
        model_info,
        seed=seed,
        max_tokens=max_tokens,
        token_bytes=PIECES,
        grammar_future=grammar_future,
    )
