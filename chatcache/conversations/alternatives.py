"""Alternatives to the tokens of a stored reply, with their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from chatcache.auth import namespace_of
from chatcache.conversations.replies.events import ReplyDelta, ReplyFinished, ReplyStarted
from chatcache.conversations.replies.service import ChatService, Reply
from chatcache.conversations.tree import ConversationTree, Item, new_id
from chatcache.conversations.turns import TurnService
from chatcache.errors import EngineError
from chatcache.types.events import TokenLogprob
from chatcache.types.request import MAX_TOP_LOGPROBS, GenerateRequest, SamplingParams

_FORCE_BIAS = 100.0  # larger than any difference of logits; reported log-probabilities are raw


@dataclass(frozen=True, slots=True)
class TokenAlternatives:
    """A token of a stored reply, and the most likely tokens at its position, best first.

    `logprob`: None for a token that the model rules out. `rank`: 1 for the most likely, None beyond those reported.
    `num_copied_pages`: KV pages that a fork at the position would copy.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    top_tokens: tuple[tuple[int, float], ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_copied_pages: int


class Alternatives:
    """Asks the engine for the most likely tokens at one position of a stored reply, or at each."""

    def __init__(self, conversations: TurnService, service: ChatService) -> None:
        self._turns = conversations
        self._service = service

    async def start(self, tree: ConversationTree, item: Item, index: int) -> Reply:
        """Ask the engine which tokens it could have generated at position `index` of a stored reply.

        This is a one-token request with top logprobs; pass its reply to `read_alternatives`.

        Raises: InvalidRequestError, and the errors of `EngineClient.submit`.
        """
        prompt = await self._turns.prompt_up_to(tree, item, index)
        request = GenerateRequest(
            request_id=new_id("look"),
            prompt=prompt.token_ids,
            params=SamplingParams(
                temperature=0.0,
                max_tokens=1,
                logit_bias={item.token_ids[index]: _FORCE_BIAS},
                ignore_eos=True,
                logprobs=MAX_TOP_LOGPROBS,
            ),
            namespace=namespace_of(tree.conversation.owner),
            num_public_tokens=prompt.num_public_tokens,
            conversation_id=tree.conversation.id,
            explain=True,
        )
        return await self._service.start(request, owner=tree.conversation.owner)

    async def start_scoring(self, tree: ConversationTree, item: Item, num_top: int) -> Reply:
        """Ask the engine for the log-probability of every token of a stored reply, and the `num_top` most likely ones.

        One pass over the reply: what comes before it is normally in the cache. Pass its reply to `read_scores`.

        Raises: InvalidRequestError, and the errors of `EngineClient.submit`.
        """
        prompt = await self._turns.prompt_up_to(tree, item, len(item.token_ids) - 1)
        num_scored = len(item.token_ids) - 1
        request = GenerateRequest(
            request_id=new_id("score"),
            prompt=prompt.token_ids,
            params=SamplingParams(
                temperature=0.0,
                max_tokens=1,
                logit_bias={item.token_ids[-1]: _FORCE_BIAS},
                ignore_eos=True,
                logprobs=num_top,
                prompt_logprobs=num_top if num_scored else None,
            ),
            prompt_logprobs_start=len(prompt.token_ids) - num_scored,
            namespace=namespace_of(tree.conversation.owner),
            num_public_tokens=prompt.num_public_tokens,
            conversation_id=tree.conversation.id,
            explain=True,
        )
        return await self._service.start(request, owner=tree.conversation.owner)


async def read_alternatives(reply: Reply, token_id: int) -> TokenAlternatives:
    """Return the most likely tokens at a position of an earlier reply, computed by `reply`.

    `reply` samples one token at that position; `token_id` is the token that the earlier reply has there, for which the
    log-probability and rank are reported if they are known. Raises: ReplyFailedError.
    """
    scored = TokenLogprob(0.0)
    drawn: int | None = None
    num_copied_pages = 0
    async with reply:
        async for event in reply.events():
            if isinstance(event, ReplyStarted) and event.report is not None:
                num_copied_pages = event.report.num_copied_pages
            elif isinstance(event, ReplyDelta) and event.logprobs:
                drawn, scored = event.token_ids[0], event.logprobs[0]
            elif isinstance(event, ReplyFinished) and drawn is not None:
                ids = [other for other, _ in scored.top]
                return TokenAlternatives(
                    token_id=token_id,
                    logprob=scored.logprob if drawn == token_id else None,
                    rank=ids.index(token_id) + 1 if token_id in ids else None,
                    top_tokens=scored.top,
                    num_prompt_tokens=event.num_prompt_tokens,
                    num_cached_tokens=event.num_cached_tokens,
                    num_copied_pages=num_copied_pages,
                )
    raise EngineError("the engine stopped without an error")


async def read_scores(reply: Reply, item: Item) -> list[TokenAlternatives]:
    """Return the tokens of a stored reply with their alternatives, computed by `reply`. Raises: ReplyFailedError."""
    scores: list[TokenLogprob | None] = []
    num_copied_pages = 0
    async with reply:
        async for event in reply.events():
            if isinstance(event, ReplyStarted):
                scores += event.prompt_logprobs
                num_copied_pages = event.report.num_copied_pages if event.report is not None else 0
            elif isinstance(event, ReplyDelta):
                scores += event.logprobs
            elif isinstance(event, ReplyFinished) and len(scores) == len(item.token_ids):
                counts = event.num_prompt_tokens, event.num_cached_tokens, num_copied_pages
                return [
                    _token_alternatives(token, scored or TokenLogprob(0.0), counts)
                    for token, scored in zip(item.token_ids, scores, strict=True)
                ]
    raise EngineError("the engine stopped without an error")


def _token_alternatives(token_id: int, scored: TokenLogprob, counts: tuple[int, int, int]) -> TokenAlternatives:
    ids = [other for other, _ in scored.top]
    rank = ids.index(token_id) + 1 if token_id in ids else None
    return TokenAlternatives(token_id, scored.logprob, rank, scored.top, *counts)
