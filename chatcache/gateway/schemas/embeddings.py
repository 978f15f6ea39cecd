"""Requests and responses of embeddings, scores and rankings.

Embeddings are OpenAI's; scores are those of vLLM, and rankings those of Jina, Cohere and vLLM.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from chatcache.gateway.schemas.completions import PromptTokensDetails
from chatcache.gateway.schemas.requests import Priority, ShortText, TokenId

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 300_000

Text = Annotated[str, Meta(min_length=1)]
Texts = Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]


class EmbeddingFields(msgspec.Struct, frozen=True):
    """`input`: a text, a list of texts, token ids, or a list of lists of token ids."""

    input: (
        Text
        | Annotated[
            list[Text | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
            Meta(min_length=1, max_length=MAX_INPUT_TOKENS),
        ]
    )
    model: ShortText | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    priority: Priority | None = None
    cache_salt: ShortText | None = None


class ScoreFields(msgspec.Struct, frozen=True):
    """`text_1` and `text_2`, which newer clients call `queries` and `documents`."""

    model: ShortText | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    priority: Priority | None = None
    cache_salt: ShortText | None = None


class RerankDocument(msgspec.Struct, frozen=True):
    text: Text


class RerankFields(msgspec.Struct, frozen=True):
    query: Text
    documents: Annotated[list[Text | RerankDocument], Meta(min_length=1, max_length=MAX_INPUTS)]
    model: ShortText | None = None
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    priority: Priority | None = None
    cache_salt: ShortText | None = None


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingItem(msgspec.Struct):
    """The embedding of one input. With `encoding_format` base64: little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class ScoreItem(msgspec.Struct):
    """The cosine similarity of one pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class Scores(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem]
    usage: EmbeddingUsage


class RankedDocument(msgspec.Struct):
    """A document, at `index` of the request, and its cosine similarity to the query."""

    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class Ranking(msgspec.Struct):
    """The documents, the most similar first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage
