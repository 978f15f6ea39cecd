"""From a caller's request to a live one: everything about it that is decided once, when it is accepted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b

from chatcache.config import EngineConfig
from chatcache.decode.actions import Strategy
from chatcache.decode.constraint_compiler import Grammars, Ticket
from chatcache.decode.validate import validate_params
from chatcache.engine.admission import (
    check_branches,
    check_priority,
    check_prompt,
    check_prompt_logprobs,
    check_request_id,
    resolve_max_tokens,
)
from chatcache.engine.preparing import Preparing
from chatcache.engine.room import Queued, check_queue, check_share
from chatcache.sched.fairness import PRIORITY
from chatcache.sched.limits import worst_case_pages
from chatcache.sched.plan import KVCapacity
from chatcache.sched.queue import WaitingQueue
from chatcache.sched.request import LiveRequest
from chatcache.types.model import ModelFacts
from chatcache.types.params import num_branches
from chatcache.types.request import GenerateRequest

StrategyFactory = Callable[..., Strategy]


class Intake:
    """Checks requests against one engine's limits and makes live ones of them, numbered as they come.

    `most_branches` may run side by side.
    """

    def __init__(
        self,
        facts: ModelFacts,
        config: EngineConfig,
        capacity: KVCapacity,
        *,
        max_model_len: int,
        most_branches: int,
        token_bytes: Sequence[bytes] | None,
        special_ids: Collection[int],
        make_strategy: StrategyFactory,
    ) -> None:
        self._facts = facts
        self._config = config
        self._capacity = capacity
        self._max_model_len = max_model_len
        self._most_branches = most_branches
        self._token_bytes = token_bytes
        self._grammars = Grammars(token_bytes, facts, special_ids)
        self._make_strategy = make_strategy
        self._num_accepted = 0

    def check(self, request: GenerateRequest) -> int:
        """Verify a request; return how many tokens each of its branches may generate.

        Raises: InvalidRequest or ContextTooLong for what can never run.
        """
        check_request_id(request.request_id)
        check_priority(request.priority)
        check_prompt(request.prompt, request.num_public_tokens, self._facts.vocab_size, self._max_model_len)
        validate_params(request.params, self._facts.vocab_size)
        check_prompt_logprobs(request)
        check_branches(request.params, self._most_branches)
        return resolve_max_tokens(request, self._capacity, self._max_model_len)

    def check_room(self, request: GenerateRequest, waiting: WaitingQueue, preparing: Preparing) -> None:
        """Verify that a request may wait with these.

        Raises: RateLimited, Overloaded when as many requests or prompt tokens wait as may.
        """
        num_tokens, most = len(request.prompt), Queued(self._config.max_num_waiting, self._config.max_waiting_tokens)
        if request.namespace:
            (num, size), (num_more, size_more) = waiting.of(request.namespace), preparing.of(request.namespace)
            check_share(Queued(num + num_more, size + size_more), num_tokens, most)
        everybody = Queued(len(waiting) + len(preparing), waiting.num_prompt_tokens + preparing.num_prompt_tokens)
        check_queue(everybody, num_tokens, most)

    def prepare_constraints(self) -> None:
        self._grammars.prepare()

    def grammar(self, request: GenerateRequest) -> Ticket | None:
        """Begin to compile what the output must match, if it must match anything.

        Raises: InvalidRequest for what can be told at once.
        """
        outputs = request.params.structured_outputs
        return None if outputs is None else self._grammars.start(outputs, request.namespace)

    def accept(self, request: GenerateRequest, max_tokens: int, ticket: Ticket | None) -> LiveRequest:
        """Make a checked request live.

        Raises: InvalidRequest for what its strategy cannot do here.
        """
        constrained = {} if ticket is None else {"ticket": ticket}
        strategy = self._make_strategy(
            request,
            self._facts,
            seed=self._seed(request),
            max_tokens=max_tokens,
            token_bytes=self._token_bytes,
            **constrained,
        )
        page_size, branches = self._capacity.page_size, num_branches(request.params)
        live = LiveRequest(
            request.request_id,
            request.prompt,
            request.namespace,
            strategy,
            self._num_accepted,
            num_public_tokens=request.num_public_tokens,
            conversation_id=request.conversation_id,
            priority=request.priority if self._config.scheduling_policy == PRIORITY else 0,
            fork_of=request.fork_of,
            explain=request.explain,
            resumed=request.resumed,
            num_prompt_top=request.params.prompt_logprobs,
            num_worst_pages=worst_case_pages(len(request.prompt), max_tokens, branches, page_size),
        )
        self._num_accepted += 1
        return live

    def _seed(self, request: GenerateRequest) -> int:
        """Return the request's seed; one that follows from engine seed and request id if it names none."""
        seed: int | None = getattr(request.params, "seed", None)
        if seed is not None:
            return seed
        name = f"{self._config.seed} {request.request_id}".encode("utf-8", "replace")
        return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
