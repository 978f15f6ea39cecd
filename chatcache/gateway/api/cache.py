"""Routes about the KV cache: explain a prompt, held pages, page map, cached conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.fork_points import TurnRequest
from chatcache.conversations.offsets import message_token_offsets
from chatcache.conversations.prompt import Function, Message, Prompt, template_variables
from chatcache.errors import InvalidRequestError, NotFoundError
from chatcache.gateway.api.attachments import replace_files
from chatcache.gateway.api.compaction import with_question
from chatcache.gateway.api.conversations import store_of
from chatcache.gateway.api.messages import input_messages, to_messages
from chatcache.gateway.api.params import check_tokens, conversation_id, parse_tool_choice
from chatcache.gateway.api.thinking import Thinking, parse_thinking
from chatcache.gateway.auth.principal import Principal, principal_of, tenant_of
from chatcache.gateway.context import Model, gateway_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.metrics import page_states, state_counts
from chatcache.gateway.middleware import read_json
from chatcache.gateway.responses.create import resolve_references
from chatcache.gateway.responses.objects import TEMPLATE_CHANGED, miss_cause
from chatcache.gateway.schemas.fields import ignored_header, parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import ExplainFields, ThinkingFields, WarmthFields
from chatcache.gateway.schemas.server import (
    CacheAccounts,
    CacheDivergence,
    CachedMessage,
    CachedPage,
    CacheExplanation,
    CacheMap,
    CacheMiss,
    CacheWarmth,
    Charge,
    Pool,
    SlotShares,
    StateSlots,
    Warmth,
)
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.stats import EngineHealth, ExplainQuery, Explanation, PackedPrompt, PageAccounts

_SHOWN_TOKENS = 16


async def explain(request: Request) -> Response:
    """POST /v1/cache/explain: look up a prompt in the cache. Computes and stores nothing."""
    gateway, principal = gateway_of(request), principal_of(request)
    body = await read_json(request)
    fields = parse_fields(body, ExplainFields)
    thinking_fields = parse_fields(body, ThinkingFields)
    ignored = unknown_fields(body, ExplainFields, ThinkingFields)
    model = await gateway.require_model(fields.model)
    thinking = parse_thinking(thinking_fields, model.service.thinking)
    functions = parse_tool_choice(model.service.reply_format, fields.tools, "none", None).functions
    if fields.messages is not None:
        given = await replace_files(gateway, principal.owner, fields.messages, "messages")
        fields = msgspec.structs.replace(fields, messages=given)
    resolved = await resolve_references(gateway, principal.owner, with_question(fields.input))
    fields = msgspec.structs.replace(fields, input=resolved)
    ends = None
    async with gateway.tokenize_throttle.acquire(principal.owner, len(await request.body())):
        messages, prompt = await _prompt(fields, model, principal, gateway.model_name, functions, thinking)
        query = ExplainQuery(
            tuple(prompt.token_ids),
            principal.tenant,
            prompt.num_public_tokens,
            fields.cache_salt or "",
            operator=gateway.is_open,
        )
        explanation = await gateway.engine.explain(query)
        pages = await asyncio.to_thread(_pages, explanation, prompt, model.tokenizer if fields.page_texts else None)
        if messages:
            ends = await asyncio.to_thread(
                message_token_offsets,
                model.tokenizer,
                messages,
                prompt,
                template_variables(functions, thinking.kwargs),
            )
    result = CacheExplanation(
        object="cache.explanation",
        model=gateway.model_name,
        prompt_tokens=explanation.num_tokens,
        cached_tokens=explanation.num_cached_tokens,
        public_tokens=prompt.num_public_tokens,
        page_size=explanation.page_size,
        pages=pages,
        miss=_miss(explanation, prompt, model.tokenizer, principal),
        divergence=_divergence(prompt, model.tokenizer),
        messages=_messages(messages, ends, explanation.num_cached_tokens) if ends is not None else None,
    )
    return json_response(result, headers=ignored_header((*thinking.ignored, *ignored)))


async def page_accounts(request: Request) -> Response:
    """GET /v1/cache/accounts: the number of KV pages that each request and conversation holds.

    A page that several requests share counts in fractions. A tenant sees its own pages; a server without keys shows
    all.
    """
    gateway, principal = gateway_of(request), principal_of(request)
    model = await gateway.require_model(None)
    held = await gateway.engine.page_accounts()
    if gateway.is_open:
        result = _accounts(held, None)
        result.pool = _pool(await gateway.health())
        return json_response(result)
    return json_response(_accounts(held, (principal.tenant, model.service.live_requests_of(principal.owner))))


async def _prompt(
    fields: ExplainFields,
    model: Model,
    principal: Principal,
    model_name: str,
    functions: tuple[Function, ...],
    thinking: Thinking,
) -> tuple[Sequence[Message], Prompt]:
    """Build the prompt that a request with these fields would have, and its messages.

    Raises: InvalidRequestError, NotFoundError.
    """
    location = fields.conversation or fields.previous_response_id or fields.previous_item_id
    given = [fields.prompt is not None, fields.messages is not None, fields.input is not None or location is not None]
    if sum(given) != 1:
        raise InvalidRequestError(
            "send one of prompt, messages, or the fields of a response.create (input, previous_response_id ...)",
            param="messages",
        )
    if fields.instructions is not None and not given[2]:
        raise InvalidRequestError("instructions go with input; messages have a system message", param="instructions")
    if fields.messages is not None:
        messages = to_messages(fields.messages, "messages")
        keeps = bool(thinking.preserves)
        return messages, await model.service.prompt(
            messages, principal.tenant, functions, kwargs=thinking.kwargs, keeps_reasoning=keeps
        )
    if fields.prompt is not None:
        return (), Prompt("", await _raw_prompt(fields.prompt, model))
    planned = await model.conversations.plan(
        TurnRequest(
            owner=principal.owner,
            model=model_name,
            input=input_messages(fields.input),
            instructions=fields.instructions,
            conversation_id=conversation_id(fields.conversation),
            previous_response_id=fields.previous_response_id,
            previous_item_id=fields.previous_item_id,
            functions=functions,
            template_kwargs=thinking.kwargs,
            preserve_thinking=thinking.preserves,
        )
    )
    return planned.messages, planned.prompt


async def _raw_prompt(prompt: str | list[int], model: Model) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await model.service.encode(prompt, add_special_tokens=True)
    check_tokens(prompt, model.tokenizer.vocab_size, "prompt")
    return tuple(prompt)


def _pages(explanation: Explanation, prompt: Prompt, tokenizer: Tokenizer | None) -> list[CachedPage]:
    """Convert the pages of a prompt. `tokenizer`: of their texts, None without texts.

    A text comes from the caller's own prompt, never from the pool: a page may have been computed for another user.
    """
    pages = [CachedPage(hit.index, hit.num_tokens, hit.state, hit.public, hit.map_index) for hit in explanation.pages]
    if tokenizer is not None:
        for page in pages:
            if page.state != "missing":
                start = page.index * explanation.page_size
                ids = prompt.token_ids[start : start + page.tokens]
                page.text = tokenizer.decode(ids, skip_special_tokens=False)
    return pages


def _miss(explanation: Explanation, prompt: Prompt, tokenizer: Tokenizer, principal: Principal) -> CacheMiss | None:
    if not explanation.reason:
        return None

    def shown(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids[:_SHOWN_TOKENS], skip_special_tokens=False)

    # The tokens that are cached instead may come from another user of the tenant.
    instead = explanation.diverged_tokens if principal.is_admin else ()
    cause = miss_cause(
        explanation.reason, explanation.at_token, explanation.detail, prompt.divergence, explanation.page_size
    )
    return CacheMiss(
        reason=cause.reason,
        at_token=cause.at_token,
        detail=cause.detail,
        text=shown(prompt.token_ids[explanation.at_token :]),
        cached_text=shown(instead) if instead else None,
    )


def _divergence(prompt: Prompt, tokenizer: Tokenizer) -> CacheDivergence | None:
    """Return where the rendered history differs from the tokens of the latest reply, if it does.

    Such a difference has the chat template as its cause, and exists whether or not the reply is cached.
    """
    where = prompt.divergence
    if where is None:
        return None
    rest = prompt.token_ids[where.token_index : where.token_index + _SHOWN_TOKENS]
    return CacheDivergence(
        reason=TEMPLATE_CHANGED,
        message=where.message_index,
        at_char=where.char_index,
        at_token=where.token_index,
        text=tokenizer.decode(rest, skip_special_tokens=False),
    )


def _messages(messages: Sequence[Message], ends: Sequence[int], num_cached: int) -> list[CachedMessage]:
    starts = (0, *ends)
    return [
        CachedMessage(index, message["role"], end - start, min(max(num_cached - start, 0), end - start))
        for index, (message, start, end) in enumerate(zip(messages, starts, ends, strict=False))
    ]


def _accounts(held: PageAccounts, tenant: tuple[str, dict[str, str]] | None) -> CacheAccounts:
    """Build the body of GET /v1/cache/accounts.

    `tenant`: the cache namespace to which it is limited, and the caller's running requests with their conversations;
    None shows all.
    """
    requests, conversations = held.requests, {name: pages for name, pages in held.conversations.items() if name}
    num_pages: float = held.num_pages_in_use
    if tenant is not None:
        namespace, live = tenant
        requests = {name: pages for name, pages in requests.items() if name in live}
        own = set(live.values())
        conversations = {name: pages for name, pages in conversations.items() if name in own}
        num_pages = held.namespaces.get(namespace, 0.0)
    return CacheAccounts(
        object="cache.accounts",
        scope="server" if tenant is None else "tenant",
        pages_in_use=round(num_pages, 3),
        page_bytes=held.page_bytes,
        requests=_charges(requests, held.states),
        conversations=_charges(conversations, {}),
    )


def _pool(health: EngineHealth) -> Pool:
    """Convert the engine's page counts to the number of pages in each state."""
    return Pool(
        page_size=health.page_size,
        **page_states(health),
        slots=SlotShares(**{part: round(share, 6) for part, share in health.slots.shares().items()}),
        waste=round(health.slots.waste, 4),
        host_pages=health.num_host_pages,
        host_pages_in_use=health.num_host_pages_in_use,
        states=StateSlots(health.state_bytes, **state_counts(health)) if health.num_states else None,
    )


def _charges(pages_of: dict[str, float], states_of: Mapping[str, float]) -> list[Charge]:
    """Convert pages by id to entries, largest first."""
    ranked = sorted(pages_of.items(), key=lambda charge: (-charge[1], charge[0]))
    states = {name: round(count, 3) for name, count in states_of.items()}
    return [Charge(name, round(pages, 3), states.get(name, UNSET)) for name, pages in ranked]


TOKEN_BYTES = 4  # bytes of one token id in a packed prompt


async def page_map(request: Request) -> Response:
    """GET /v1/cache/map: the state of every page.

    Pages of other tenants are marked as such, without their state.
    """
    gateway, tenant = gateway_of(request), tenant_of(request)
    await gateway.require_model(None)
    pages = await gateway.engine.page_map(tenant, operator=gateway.is_open)
    return json_response(CacheMap("cache.map", pages.page_size, pages.num_pages, pages.num_pages_per_cell, pages.cells))


async def warmth(request: Request) -> Response:
    """POST /v1/cache/warmth: how much of each conversation's active path is cached.

    Changes nothing.
    """
    gateway, principal = gateway_of(request), principal_of(request)
    body = await read_json(request)
    fields = parse_fields(body, WarmthFields)
    ignored = unknown_fields(body, WarmthFields)
    model, store = await gateway.require_model(None), store_of(request)
    prompts: dict[str, PackedPrompt] = {}
    for stored_id in fields.conversations:
        with suppress(NotFoundError):
            prompts[stored_id] = await model.prompts.get(store, principal.owner, stored_id)
    max_bytes = gateway.max_model_len * TOKEN_BYTES  # tokens beyond the context length are never computed
    cut = [PackedPrompt(prompt.tokens[:max_bytes], prompt.num_public_tokens) for prompt in prompts.values()]
    counts = await gateway.engine.count_cached_tokens(cut, principal.tenant)
    entries = [
        Warmth(stored_id, len(prompt.tokens) // TOKEN_BYTES, count)
        for (stored_id, prompt), count in zip(prompts.items(), counts, strict=True)
    ]
    return json_response(CacheWarmth("list", entries), headers=ignored_header(ignored))
