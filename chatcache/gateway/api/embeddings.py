"""POST /v1/embeddings, /v1/score and /v1/rerank: embeddings of texts, and their cosine similarities.

Each input is one engine request, scheduled like any other. `EmbeddingBatch` submits the inputs of a call, a few at a
time, so that a long list neither fills the engine's queue nor keeps other requests out.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.replies.service import ChatService, EmbeddedPrompt
from chatcache.conversations.tree import new_id
from chatcache.errors import ContextLengthError, InvalidRequestError, OverloadedError, RateLimitError
from chatcache.gateway.api.params import check_tokens, rename_error_params
from chatcache.gateway.auth.principal import principal_of
from chatcache.gateway.context import Gateway, gateway_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.json_codec import preencoded
from chatcache.gateway.limits.admission import CHARS_PER_TOKEN, AdmissionTicket
from chatcache.gateway.limits.rate_limits import RequestCost
from chatcache.gateway.middleware import cancel_on_disconnect, read_json
from chatcache.gateway.schemas.completions import PromptTokensDetails
from chatcache.gateway.schemas.embeddings import (
    MAX_INPUT_TOKENS,
    MAX_INPUTS,
    EmbeddingFields,
    EmbeddingItem,
    Embeddings,
    EmbeddingUsage,
    RankedDocument,
    Ranking,
    RerankDocument,
    RerankFields,
    ScoreFields,
    ScoreItem,
    Scores,
    Texts,
)
from chatcache.gateway.schemas.fields import ignored_header, parse_fields, unknown_fields
from chatcache.types.plan import F32
from chatcache.types.request import GenerateRequest, PoolingParams

MAX_IN_FLIGHT = 32  # inputs of one call in the engine

Input = str | Sequence[int]


class Work(NamedTuple):
    """The inputs of a call, and the fields that all routes have.

    `param`: the field of the inputs. `first`: the field of the first inputs, if that is another, and their number.
    `truncates`: shorten inputs that exceed the context instead of refusing them.
    """

    inputs: Sequence[Input]
    param: str
    model: str | None
    priority: int | None = None
    cache_salt: str | None = None
    dimensions: int | None = None
    truncates: bool = False
    first: tuple[str, int] = ("", 0)

    def position(self, index: int) -> tuple[str, int]:
        """Return the field of an input and its index there."""
        name, num_first = self.first
        return (name, index) if index < num_first else (self.param, index - num_first)


async def embeddings(request: Request) -> Response:
    """POST /v1/embeddings."""
    body = await read_json(request)
    fields = parse_fields(body, EmbeddingFields)
    ignored = unknown_fields(body, EmbeddingFields)
    work = Work(
        _split(fields.input), "input", fields.model, fields.priority, fields.cache_salt, dimensions=fields.dimensions
    )
    embedded = await embed(request, work)
    name = gateway_of(request).model_name

    def respond() -> Response:
        is_base64 = fields.encoding_format == "base64"
        items = [
            EmbeddingItem("embedding", index, _encoded(each.values, is_base64=is_base64))
            for index, each in enumerate(embedded)
        ]
        return json_response(Embeddings("list", items, name, _usage(embedded)), headers=ignored_header(ignored))

    return await asyncio.to_thread(respond)


async def score(request: Request) -> Response:
    """POST /v1/score: the cosine similarity of pairs of texts."""
    body = await read_json(request)
    fields = parse_fields(body, ScoreFields)
    ignored = unknown_fields(body, ScoreFields)
    first = _chosen(fields.text_1, fields.queries, "text_1", "queries")
    second = _chosen(fields.text_2, fields.documents, "text_2", "documents")
    if len(first) not in (1, len(second)):
        raise InvalidRequestError(
            f"text_1 must be one text, or as many as text_2: got {len(first)} and {len(second)}", param="text_1"
        )
    work = Work(
        [*first, *second],
        "text_2" if fields.documents is None else "documents",
        fields.model,
        fields.priority,
        fields.cache_salt,
        first=("text_1" if fields.queries is None else "queries", len(first)),
    )
    embedded = await embed(request, work)
    scores = _cosines(embedded, len(first))
    items = [ScoreItem(index, "score", value) for index, value in enumerate(scores)]
    return json_response(
        Scores(new_id("score", "-"), "list", int(time.time()), gateway_of(request).model_name, items, _usage(embedded)),
        headers=ignored_header(ignored),
    )


async def rerank(request: Request) -> Response:
    """POST /v1/rerank: documents by their cosine similarity to a query."""
    body = await read_json(request)
    fields = parse_fields(body, RerankFields)
    ignored = unknown_fields(body, RerankFields)
    texts = [each if isinstance(each, str) else each.text for each in fields.documents]
    work = Work(
        [fields.query, *texts], "documents", fields.model, fields.priority, fields.cache_salt, first=("query", 1)
    )
    embedded = await embed(request, work)
    results = [RankedDocument(index, value) for index, value in enumerate(_cosines(embedded, 1))]
    results.sort(key=lambda each: -each.relevance_score)  # stable: equal documents keep their order
    results = results[: fields.top_n or None]
    if fields.return_documents is not False:
        for each in results:
            each.document = RerankDocument(texts[each.index])
    ranking = Ranking(new_id("rerank", "-"), gateway_of(request).model_name, results, _usage(embedded))
    return json_response(ranking, headers=ignored_header(ignored))


def _split(given: object) -> list[Input]:
    """Return the inputs of `input`. Raises: InvalidRequestError for a mixture, and for too many."""
    if isinstance(given, str):
        return [given]
    entries = cast(list[str | int | list[int]], given)
    kinds = set(map(type, entries))
    if kinds == {int}:
        return [cast(list[int], entries)]
    if len(kinds) > 1:
        raise InvalidRequestError("input: texts and token ids do not mix in one list", param="input")
    if len(entries) > MAX_INPUTS:
        raise InvalidRequestError(f"input: at most {MAX_INPUTS} inputs, got {len(entries)}", param="input")
    return cast(list[Input], entries)


def _chosen(texts: Texts | None, others: Texts | None, name: str, other_name: str) -> list[str]:
    """Return the texts of a field that has two names. Raises: InvalidRequestError unless one of them is used."""
    if (texts is None) == (others is None):
        raise (
            InvalidRequestError(f"send either {name} or {other_name}", param=name, code="missing_required_parameter")
            if texts is None
            else InvalidRequestError(f"{name} and {other_name} exclude each other", param=other_name)
        )
    chosen = texts if texts is not None else others
    return [chosen] if isinstance(chosen, str) else list(chosen or ())


async def embed(request: Request, work: Work) -> list[EmbeddedPrompt]:
    """Embed the inputs of a call, in order; a text that occurs again is not computed again.

    Raises: InvalidRequestError, ContextLengthError, the errors of admission and of the engine.
    """
    gateway, principal = gateway_of(request), principal_of(request)
    model = await gateway.require_model(work.model)
    priority = gateway.priority(work.priority)
    num_chars = sum(len(each) if isinstance(each, str) else CHARS_PER_TOKEN * len(each) for each in work.inputs)
    cost = RequestCost(num_chars // CHARS_PER_TOKEN, num_prompts=1, width=1, max_tokens=0)
    async with gateway.admission.acquire(principal, cost) as permit:
        prompts = await asyncio.to_thread(_tokenize, gateway, model.service, work)
        distinct = list(dict.fromkeys(prompts))
        call_id = new_id("embd", "-")
        requests = [
            GenerateRequest(
                request_id=f"{call_id}-{index}",
                prompt=prompt,
                pooling=PoolingParams(dimensions=work.dimensions),
                namespace=principal.tenant,
                cache_salt=work.cache_salt or "",
                priority=priority,
            )
            for index, prompt in enumerate(distinct)
        ]
        batch = EmbeddingBatch(model.service, requests, principal.owner, permit)
        with rename_error_params(prompt=work.param):
            results = await cancel_on_disconnect(request, batch.run())
    by_prompt = dict(zip(distinct, results, strict=True))
    return [by_prompt[prompt] for prompt in prompts]


def _tokenize(gateway: Gateway, service: ChatService, work: Work) -> list[tuple[int, ...]]:
    """Return the token ids of the inputs. Raises: InvalidRequestError, ContextLengthError."""
    prompts: list[tuple[int, ...]] = []
    num_tokens, tokenizer, max_model_len = 0, service.tokenizer, gateway.max_model_len
    for index, each in enumerate(work.inputs):
        param, at = work.position(index)
        if isinstance(each, str):
            service.limits.check(len(each))
            prompt = tuple(tokenizer.encode(each, add_special_tokens=True))
        else:
            check_tokens(each, tokenizer.vocab_size, param)
            prompt = tuple(each)
        if not prompt:
            raise InvalidRequestError(f"{param}: input {at} has no tokens", param=param)
        if work.truncates:
            prompt = prompt[:max_model_len]
        if len(prompt) > max_model_len:
            raise ContextLengthError(
                f"{param}: input {at} has {len(prompt)} tokens; "
                f"this model's maximum context length is {max_model_len} tokens",
                param=param,
            )
        num_tokens += len(prompt)
        if num_tokens > MAX_INPUT_TOKENS:
            raise InvalidRequestError(
                f"{work.param}: at most {MAX_INPUT_TOKENS} tokens in all; send several requests", param=work.param
            )
        prompts.append(prompt)
    return prompts


class EmbeddingBatch:
    """Runs the engine requests of one call, up to MAX_IN_FLIGHT at a time.

    If the engine's queue is full, fewer run at a time; the call fails only if not even one fits.
    """

    def __init__(
        self, service: ChatService, requests: Sequence[GenerateRequest], owner: str, permit: AdmissionTicket
    ) -> None:
        self._service = service
        self._owner = owner
        self._permit = permit
        self._waiting = deque(enumerate(requests))
        self._results: dict[int, EmbeddedPrompt] = {}
        self._num_workers = min(MAX_IN_FLIGHT, len(requests))

    async def run(self) -> list[EmbeddedPrompt]:
        """Return the results in the order of the requests.

        Raises: the first error of any request; the others are then aborted.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._num_workers):
                    group.create_task(self._work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [self._results[index] for index in range(len(self._results))]

    async def _work(self) -> None:
        while self._waiting:
            index, request = self._waiting.popleft()
            try:
                result = await self._service.embed(request, self._owner)
            except (OverloadedError, RateLimitError) as error:
                if self._num_workers == 1 or error.code not in (OverloadedError.code, RateLimitError.code):
                    raise
                self._waiting.appendleft((index, request))
                break
            except BaseException:
                self._permit.add_tokens(len(request.prompt))  # perhaps all of them were computed
                raise
            self._permit.add_tokens(result.num_prompt_tokens - result.num_cached_tokens)
            self._results[index] = result
        self._num_workers -= 1


def _vector(values: bytes) -> F32:
    return np.frombuffer(values, "<f4")


def _encoded(values: bytes, *, is_base64: bool) -> list[float] | str:
    """Return an embedding as text, or as encoded JSON, which takes less memory than a list."""
    return base64.b64encode(values).decode() if is_base64 else preencoded(_vector(values).tolist())


def _cosines(embedded: Sequence[EmbeddedPrompt], num_first: int) -> list[float]:
    """Return the cosine similarity of each text after the first `num_first` to its partner among those."""
    vectors = np.stack([_vector(each.values) for each in embedded]).astype(np.float64)
    cosines: list[float] = np.clip((vectors[:num_first] * vectors[num_first:]).sum(axis=1), -1.0, 1.0).tolist()
    return cosines


def _usage(embedded: Sequence[EmbeddedPrompt]) -> EmbeddingUsage:
    num_tokens = sum(each.num_prompt_tokens for each in embedded)
    num_cached = sum(each.num_cached_tokens for each in embedded)
    return EmbeddingUsage(num_tokens, num_tokens, PromptTokensDetails(num_cached, num_tokens - num_cached))
