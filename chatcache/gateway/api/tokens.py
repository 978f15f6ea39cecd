"""Tokens of a stored message: positions in the text, and alternatives at each token."""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.alternatives import Alternatives, TokenAlternatives, read_alternatives, read_scores
from chatcache.conversations.fork_points import require_generated
from chatcache.conversations.tree import ConversationTree, Item
from chatcache.gateway.api.conversations import find_item, message_id_of, store_of
from chatcache.gateway.api.logprobs import MIN_LOGPROB, token_text
from chatcache.gateway.api.pagination import parse_number
from chatcache.gateway.auth.principal import owner_of, principal_of
from chatcache.gateway.context import gateway_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.limits.rate_limits import RequestCost
from chatcache.gateway.middleware import cancel_on_disconnect
from chatcache.gateway.schemas.responses import (
    Alternative,
    MessageToken,
    MessageTokens,
    PlacedToken,
    TokenSpan,
    TokenUsage,
)
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.request import MAX_TOP_LOGPROBS

_DEFAULT_TOP = "8"


async def list_tokens(request: Request) -> Response:
    """GET .../items/{item_id}/tokens: the characters of the text that each token stands for.

    With `top`: also the probability of each token and the most likely ones, computed in one pass.
    """
    top = request.query_params.get("top")
    num_top = None if top is None else parse_number(top, "top", 0, MAX_TOP_LOGPROBS)
    model = await gateway_of(request).require_model(None)
    tree, item = await _load_message(request)
    spans = await model.conversations.token_offsets(tree, item)
    entries = [TokenSpan(index, *(span or (None, None))) for index, span in enumerate(spans)]
    answer = MessageTokens("list", item.id, entries)
    if num_top is None:
        return json_response(answer)
    cost = RequestCost(len(item.token_ids), max_tokens=1)
    async with gateway_of(request).admission.acquire(principal_of(request), cost) as permit:
        reply = await Alternatives(model.conversations, model.service).start_scoring(tree, item, num_top)
        permit.attach(reply)
    looks = await cancel_on_disconnect(request, read_scores(reply, item))
    for entry, look in zip(entries, looks, strict=True):
        scored = _message_token(model.tokenizer, entry.index, look, num_top)
        entry.token, entry.alternatives, answer.usage = scored.token, scored.alternatives, scored.usage
    return json_response(answer)


async def get_token(request: Request) -> Response:
    """GET .../tokens/{index}: the most likely tokens at that position.

    Runs one step, stores nothing.
    """
    top = parse_number(request.query_params.get("top", _DEFAULT_TOP), "top", 1, MAX_TOP_LOGPROBS)
    model = await gateway_of(request).require_model(None)
    tree, item = await _load_message(request)
    require_generated(tree, item, "item_id")
    index = parse_number(request.path_params["index"], "index", 0, len(item.token_ids) - 1)
    async with gateway_of(request).admission.acquire(principal_of(request), RequestCost(0, max_tokens=1)) as permit:
        reply = await Alternatives(model.conversations, model.service).start(tree, item, index)
        permit.attach(reply)
    look = await cancel_on_disconnect(request, read_alternatives(reply, item.token_ids[index]))
    return json_response(_message_token(model.tokenizer, index, look, top))


async def _load_message(request: Request) -> tuple[ConversationTree, Item]:
    """Load the message that the path names. Raises: NotFoundError."""
    item_id = request.path_params["item_id"]
    tree = await store_of(request).load_path(owner_of(request), request.path_params["id"], message_id_of(item_id))
    return tree, find_item(tree, item_id)[0]


def _message_token(tokenizer: Tokenizer, index: int, look: TokenAlternatives, top: int) -> MessageToken:
    chosen = _alternative(tokenizer, look.token_id, look.logprob)
    return MessageToken(
        object="message.token",
        index=index,
        token=PlacedToken(chosen.id, chosen.text, chosen.logprob, chosen.probability, chosen.ends, look.rank),
        alternatives=[_alternative(tokenizer, token, logprob) for token, logprob in look.top_tokens[:top]],
        usage=TokenUsage(look.num_prompt_tokens, look.num_cached_tokens, look.num_copied_pages),
    )


def _alternative(tokenizer: Tokenizer, token: int, logprob: float | None) -> Alternative:
    """Build the entry of one token.

    `logprob`: None for a token that the model rules out.
    """
    return Alternative(
        id=token,
        text=token_text(tokenizer, token),
        logprob=MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB),
        probability=0.0 if logprob is None else math.exp(logprob),
        ends=token in tokenizer.eos_token_ids,
    )
