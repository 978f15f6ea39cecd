"""Token alternatives: the model's distribution at one position of a stored reply.

One token is generated after prompt + reply[:index], which the cache holds, with a logit bias that forces reply[index];
the raw log-probabilities of that token and of the likeliest ones are reported.
"""

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
    """The token at the position and the likeliest tokens, best first.

    `logprob`: None for a token that the model rules out. `rank`: 1 for the likeliest, None beyond those reported.
    `num_copied_pages`: pages that a fork at the position would copy.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    top_tokens: tuple[tuple[int, float], ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_copied_pages: int


class Alternatives:
    """Requests the alternatives of tokens of stored replies."""

    def __init__(self, conversations: TurnService, service: ChatService) -> None:
        self._turns = conversations
        self._service = service

    async def start(self, tree: ConversationTree, item: Item, index: int) -> Reply:
        """Submit the request for token `index` of a reply; pass the result to `read_alternatives`.

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


async def read_alternatives(reply: Reply, token_id: int) -> TokenAlternatives:
    """Read the reply to its end and return the alternatives. Raises: ReplyFailedError."""
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
