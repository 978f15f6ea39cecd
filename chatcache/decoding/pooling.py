"""Embeddings: one vector of the final hidden states of a prompt's tokens, instead of new tokens.

    last   the hidden state of the last token, which has attended to all others; cached tokens are not computed again
    mean   the mean over all tokens; so every token is computed, also those whose pages are cached

Both are normalised to Euclidean length 1, as in vLLM and the OpenAI API.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from chatcache.errors import InvalidRequestError
from chatcache.types.actions import Advance, Candidates, DrawSpec, DroppedCandidate, Embed, Release, cannot_drop_error
from chatcache.types.plan import F32
from chatcache.types.request import GenerateRequest, PoolingParams, format_value
from chatcache.types.stats import ModelInfo

LAST = "last"
MEAN = "mean"


def check_pooling(params: PoolingParams, model_info: ModelInfo) -> None:
    """Verify that the model has embeddings of this size.

    Raises: InvalidRequestError.
    """
    size, dimensions = model_info.hidden_size, params.dimensions
    if not size:
        raise InvalidRequestError("this model has no embeddings: its final hidden states are not known")
    if dimensions is None:
        return
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= size:
        raise InvalidRequestError(
            f"dimensions must be an integer between 1 and {size}, the size of this model's embeddings, "
            f"got {format_value(dimensions)}",
            param="dimensions",
        )


class PoolingStrategy:
    """Pools the hidden states of one prompt. Satisfies `actions.Pooler`."""

    max_branches = 1
    lockstep = False
    has_fixed_draws = True

    def __init__(self, request: GenerateRequest, model_info: ModelInfo) -> None:
        params = request.pooling or PoolingParams()
        self._num_prompt = len(request.prompt)
        self._is_mean = model_info.pooling == MEAN
        self._dimensions = params.dimensions
        self._sum: F32 | None = None
        self._num_pooled = 0

    @property
    def max_matched_tokens(self) -> int | None:
        """Limit on the prompt tokens that may be matched: with mean pooling, those pooled already."""
        return self._num_pooled if self._is_mean else None

    def num_pooled_tokens(self, start: int, stop: int) -> int:
        """Return how many of the last prompt tokens from `start` to `stop` are to be pooled."""
        if self._is_mean:
            return max(stop - max(start, self._num_pooled), 0)
        return int(stop == self._num_prompt)

    def add(self, hidden: F32, num_tokens: int) -> None:
        """Add the sum of the hidden states of the next `num_tokens` tokens. Shape [hidden]."""
        self._sum = hidden if self._sum is None else self._sum + hidden
        self._num_pooled += num_tokens

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        """Return nothing: no token is sampled."""
        return ()

    def drop(self, index: int) -> DroppedCandidate | None:
        """Raise UnsupportedParameterError: there are no candidates."""
        raise cannot_drop_error("embeddings")

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        """Return the embedding; the whole prompt has been computed."""
        if self._sum is None:
            raise ValueError("no hidden state was pooled")
        pooled = self._sum[: self._dimensions].astype(np.float64)
        values = pooled / max(float(np.linalg.norm(pooled)), 1e-12)  # the length of the sum is that of the mean
        return Advance((Release(0),), (Embed(values.astype("<f4").tobytes()),), finished=True)
