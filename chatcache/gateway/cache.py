"""What the KV cache holds: of a prompt before it is sent, and of everybody who is being answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from chatcache.chat.places import TurnRequest
from chatcache.chat.prompt import Message, Prompt
from chatcache.chat.spans import message_ends
from chatcache.chat.tools import Function, variables
from chatcache.errors import InvalidRequest
from chatcache.gateway.body import read_json
from chatcache.gateway.context import Model, gateway_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.fields import ignored_header, read, unknown_fields
from chatcache.gateway.messages import input_messages, to_messages
from chatcache.gateway.metrics import page_states
from chatcache.gateway.misses import TEMPLATE_CHANGED, miss_json
from chatcache.gateway.params import check_tokens, conversation_id
from chatcache.gateway.principal import Principal, principal_of
from chatcache.gateway.tooling import tool_use
from chatcache.gateway.wire import ExplainFields
from chatcache.text.tokenizer import Tokenizer
from chatcache.types.health import EngineHealth
from chatcache.types.pages import Explanation, PageAccounts

_SHOWN_TOKENS = 16


async def explain(request: Request) -> Response:
    """POST /v1/cache/explain: a dry run. Nothing is computed, stored or kept."""
    gateway, principal = gateway_of(request), principal_of(request)
    body = await read_json(request)
    fields = read(body, ExplainFields)
    ignored = unknown_fields(body, ExplainFields)
    model = await gateway.ready(fields.model)
    functions = tool_use(model.service.form, fields.tools, "none", None).functions
    ends = None
    async with gateway.counting.turn(principal.owner, len(await request.body())):
        messages, prompt = await _prompt(fields, model, principal, gateway.model_name, functions)
        explanation = await gateway.engine.explain(
            prompt.token_ids, principal.tenant, prompt.num_public_tokens, operator=gateway.is_open
        )
        if messages:
            ends = await asyncio.to_thread(message_ends, model.tokenizer, messages, prompt, variables(functions))
    answer = {
        "object": "cache.explanation",
        "model": gateway.model_name,
        "prompt_tokens": explanation.num_tokens,
        "cached_tokens": explanation.num_cached_tokens,
        "public_tokens": prompt.num_public_tokens,
        "page_size": explanation.page_size,
        "pages": [
            {"index": page.index, "tokens": page.num_tokens, "state": page.state, "public": page.public}
            for page in explanation.pages
        ],
        "miss": _miss(explanation, prompt, model.tokenizer, principal),
        "divergence": _divergence(prompt, model.tokenizer),
        "messages": _messages(messages, ends, explanation.num_cached_tokens) if ends is not None else None,
    }
    return json_response(answer, headers=ignored_header(ignored))


async def accounts(request: Request) -> Response:
    """GET /v1/cache/accounts: pages held now, shared ones in fractions. A tenant sees its own, an open server all."""
    gateway, principal = gateway_of(request), principal_of(request)
    model = await gateway.ready(None)
    held = await gateway.engine.accounts()
    if gateway.is_open:
        return json_response({**_accounts_json(held, None), "pool": _pool_json(await gateway.health())})
    return json_response(_accounts_json(held, (principal.tenant, model.service.live_of(principal.owner))))


async def _prompt(
    fields: ExplainFields, model: Model, principal: Principal, model_name: str, functions: tuple[Function, ...]
) -> tuple[Sequence[Message], Prompt]:
    """The prompt that a request with these fields would have, and its messages. Raises: InvalidRequest, NotFound."""
    place = fields.conversation or fields.previous_response_id or fields.previous_item_id
    given = [fields.prompt is not None, fields.messages is not None, fields.input is not None or place is not None]
    if sum(given) != 1:
        raise InvalidRequest(
            "send one of prompt, messages, or the fields of a response.create (input, previous_response_id ...)",
            param="messages",
        )
    if fields.instructions is not None and not given[2]:
        raise InvalidRequest("instructions go with input; messages have a system message", param="instructions")
    if fields.messages is not None:
        messages = to_messages(fields.messages, "messages")
        return messages, await model.service.prompt(messages, principal.tenant, functions)
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
        )
    )
    return planned.messages, planned.prompt


async def _raw_prompt(prompt: str | list[int], model: Model) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await model.service.encode(prompt, add_special_tokens=True)
    check_tokens(prompt, model.tokenizer.vocab_size, "prompt")
    return tuple(prompt)


def _miss(
    explanation: Explanation, prompt: Prompt, tokenizer: Tokenizer, principal: Principal
) -> dict[str, object] | None:
    if not explanation.reason:
        return None

    def shown(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids[:_SHOWN_TOKENS], skip_special_tokens=False)

    # What the cache has instead may be what another user of the tenant said.
    instead = explanation.diverged_tokens if principal.is_admin else ()
    why = miss_json(
        explanation.reason, explanation.at_token, explanation.detail, prompt.divergence, explanation.page_size
    )
    return {
        **why,
        "text": shown(prompt.token_ids[explanation.at_token :]),
        "cached_text": shown(instead) if instead else None,
    }


def _divergence(prompt: Prompt, tokenizer: Tokenizer) -> dict[str, object] | None:
    """Where the rendering leaves what the latest reply of ours was generated from, whatever is cached."""
    where = prompt.divergence
    if where is None:
        return None
    rest = prompt.token_ids[where.at_token : where.at_token + _SHOWN_TOKENS]
    return {
        "reason": TEMPLATE_CHANGED,
        "message": where.message,
        "at_char": where.at_char,
        "at_token": where.at_token,
        "text": tokenizer.decode(rest, skip_special_tokens=False),
    }


def _messages(messages: Sequence[Message], ends: Sequence[int], num_cached: int) -> list[dict[str, object]]:
    starts = (0, *ends)
    return [
        {
            "index": index,
            "role": message["role"],
            "tokens": end - start,
            "cached_tokens": min(max(num_cached - start, 0), end - start),
        }
        for index, (message, start, end) in enumerate(zip(messages, starts, ends, strict=False))
    ]


def _accounts_json(held: PageAccounts, tenant: tuple[str, dict[str, str]] | None) -> dict[str, object]:
    """`tenant`: its namespace and its live requests' conversations, or None for everybody's figures."""
    requests, conversations = held.requests, {name: pages for name, pages in held.conversations.items() if name}
    num_pages: float = held.num_pages_in_use
    if tenant is not None:
        namespace, live = tenant
        requests = {name: pages for name, pages in requests.items() if name in live}
        own = set(live.values())
        conversations = {name: pages for name, pages in conversations.items() if name in own}
        num_pages = held.namespaces.get(namespace, 0.0)
    return {
        "object": "cache.accounts",
        "scope": "server" if tenant is None else "tenant",
        "pages_in_use": round(num_pages, 3),
        "page_bytes": held.page_bytes,
        "requests": _charges(requests),
        "conversations": _charges(conversations),
    }


def _pool_json(health: EngineHealth) -> dict[str, object]:
    """The page map: every page in one state, as of a moment ago."""
    return {
        "page_size": health.page_size,
        **page_states(health),
        "waste": round(health.waste_fraction, 4),
        "host_pages": health.num_host_pages,
        "host_pages_in_use": health.num_host_pages_in_use,
    }


def _charges(pages_of: dict[str, float]) -> list[dict[str, object]]:
    """Most pages first."""
    ranked = sorted(pages_of.items(), key=lambda charge: (-charge[1], charge[0]))
    return [{"id": name, "pages": round(pages, 3)} for name, pages in ranked]
