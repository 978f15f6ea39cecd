"""Random adversarial requests that the schemas allow: bounds, extremes and odd combinations of all fields."""

from __future__ import annotations

import random
from typing import Any

from chatcache.decoding.strategy import (
    MAX_DIVERSITY_PENALTY,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from chatcache.types.request import (
    MAX_PRIORITY,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    BeamSearchParams,
    ForkPoint,
    GenerateRequest,
    Params,
    SamplingParams,
    StructuredOutputs,
)

WIDTHS = (1, 1, 1, 1, 2, 3, 7, 16)
TINY = 5e-324

STRUCTURES: tuple[StructuredOutputs, ...] = (
    StructuredOutputs(json_object=True),
    StructuredOutputs(json='{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'),
    StructuredOutputs(json='{"enum":[]}'),
    StructuredOutputs(json="true"),
    StructuredOutputs(json='{"$ref":"#"}'),
    StructuredOutputs(json='{"type":"array","minItems":100000}'),
    StructuredOutputs(json='{"type":"string","pattern":"(a+)+b$","maxLength":5}'),
    StructuredOutputs(regex="(a+)+b"),
    StructuredOutputs(regex="[ab]{1,9}|é+|😀"),
    StructuredOutputs(regex="("),
    StructuredOutputs(regex=""),
    StructuredOutputs(regex="\x00"),
    StructuredOutputs(choice=("yes", "no")),
    StructuredOutputs(choice=("a", "aa", "aaa", "\x00", "\u2028")),
    StructuredOutputs(grammar='start: "a" start | "b"'),
    StructuredOutputs(grammar="start: start"),
    StructuredOutputs(grammar="start: <[0]>", special_token_ids=(0,)),
    StructuredOutputs(grammar="%import nothing"),
    StructuredOutputs(json='{"a":' * 900 + "1" + "}" * 900),
)


class Adversary:
    """Draws requests for a vocabulary from a seed. `max_tokens` limits the cost of each request."""

    def __init__(
        self, seed: int, vocab_size: int, *, max_model_len: int, structures: bool = True, max_tokens: int = 6
    ) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._structures = structures
        self._max_tokens = max_tokens
        self._num_drawn = 0

    def request(self) -> GenerateRequest:
        """Draw the next request."""
        self._num_drawn += 1
        prompt = self._prompt()
        return GenerateRequest(
            request_id=f"hostile{self._num_drawn}",
            prompt=prompt,
            params=self.params(),
            namespace=self._pick("", "", "t", "\x00", "é" * 300, "reference"),
            num_public_tokens=self._pick(0, 0, 0, 1, len(prompt)),
            conversation_id=self._pick("", "c", "\x00"),
            priority=self._pick(0, -MAX_PRIORITY, MAX_PRIORITY),
            fork_of=self._pick(None, None, None, self._fork()),
            explain=self._pick(False, True),
        )

    def params(self) -> Params:
        """Draw parameters that the validator accepts in nearly all cases."""
        return self._beams() if self._random.random() < 0.25 else self._sampling()

    def _fork(self) -> ForkPoint:
        name = self._pick(
            "nobody", "", f"hostile{self._random.randrange(1, self._num_drawn + 2)}", "reference0", "reference5"
        )
        return ForkPoint(name, self._pick(0, 1, 63, -1, 2**31))

    def _prompt(self) -> tuple[int, ...]:
        last = self._vocab_size - 1
        kind = self._random.random()
        length = self._pick(1, 1, 2, 15, 16, 17, 31, 32, 33, 48)
        if kind < 0.1:
            return (int(self._pick(0, last)),) * int(length)
        if kind < 0.4:  # same prefix as a reference request
            return (*range(1, 30), self._random.randrange(self._vocab_size))[: int(length)]
        return tuple(self._random.randrange(self._vocab_size) for _ in range(length))

    def _shared(self) -> dict[str, Any]:
        every, size, most = tuple(range(self._vocab_size)), self._vocab_size, self._max_tokens
        max_tokens = self._pick(1, 1, 2, 3, most)
        return {
            "max_tokens": max_tokens,
            "min_tokens": self._pick(0, 0, 1, max_tokens),
            "stop": self._pick((), (), ("a",), ("\x00", "é😀"), ("x" * MAX_STOP_CHARS,) * MAX_STOP_STRINGS, (" ", "e")),
            "stop_token_ids": self._pick((), (), (0,), (size - 1,), every[:MAX_STOP_TOKEN_IDS]),
            "include_stop_str_in_output": self._pick(False, True),
            "ignore_eos": self._pick(False, True),
            "skip_special_tokens": self._pick(False, True),
            "logprobs": self._pick(None, None, 0, 1, MAX_TOP_LOGPROBS),
            "prompt_logprobs": self._pick(None, None, None, 0, MAX_TOP_LOGPROBS),
            "structured_outputs": self._pick(*STRUCTURES)
            if self._structures and self._random.random() < 0.15
            else None,
        }

    def _sampling(self) -> SamplingParams:
        size = self._vocab_size
        n = self._pick(*WIDTHS)
        temperature = self._pick(0.0, TINY, 1e-30, 1e-6, 0.7, 1.0, 2.0, MAX_TEMPERATURE)
        kind = self._random.random()
        distinct = kind < 0.2 and temperature > 0.0
        return SamplingParams(
            n=n,
            best_of=self._pick(n, min(2 * n, 16)) if 0.2 <= kind < 0.4 else None,
            distinct=distinct,
            temperature=temperature,
            top_p=self._pick(TINY, 1e-9, 0.5, 0.999999, 1.0, 1.0),
            top_k=self._pick(-1, 0, 0, 1, 2, 7, size - 1, size),
            min_p=self._pick(0.0, 0.0, TINY, 0.3, 1.0),
            repetition_penalty=self._pick(1.0, 1.0, MIN_REPETITION_PENALTY, 2.0, MAX_REPETITION_PENALTY),
            presence_penalty=self._pick(0.0, 0.0, -2.0, 2.0),
            frequency_penalty=self._pick(0.0, 0.0, -2.0, 2.0),
            logit_bias=self._bias(),
            seed=self._pick(None, 0, -1, 2**63 - 1, -(2**63), 2**64 - 1),
            **self._shared(),
        )

    def _bias(self) -> dict[int, float] | None:
        size = self._vocab_size
        found: dict[int, float] | None = self._pick(
            None,
            None,
            {},
            {0: MAX_LOGIT_BIAS},
            {size - 1: -MAX_LOGIT_BIAS, 0: MAX_LOGIT_BIAS},
            {size // 2: TINY},
            dict.fromkeys(range(min(size, MAX_LOGIT_BIAS_ENTRIES)), -MAX_LOGIT_BIAS),
        )
        return found

    def _beams(self) -> BeamSearchParams:
        width, groups = self._pick((1, 1), (2, 1), (2, 2), (5, 1), (6, 3), (16, 1), (16, 16))
        return BeamSearchParams(
            beam_width=width,
            n=self._pick(None, 1, width),
            length_penalty=self._pick(-MAX_LENGTH_PENALTY, 0.0, TINY, 1.0, MAX_LENGTH_PENALTY),
            early_stopping=self._pick(True, False, "never"),
            num_beam_groups=groups,
            diversity_penalty=self._pick(0.0, TINY, MAX_DIVERSITY_PENALTY) if groups > 1 else 0.0,
            stream_beams=self._pick(False, True),
            **self._shared(),
        )

    def _pick(self, *values: Any) -> Any:
        return values[self._random.randrange(len(values))]
