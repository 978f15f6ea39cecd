"""What is refused at the door, with the numbers in the message.

Requests that are accepted but whose grammar is still being compiled, beside the loop.

From a caller's request to a live one: everything about it that is decided once, when it is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from hashlib import blake2b

from chatcache.config import EngineConfig
from chatcache.decoding.grammar.compiler import GrammarCompiler, GrammarFuture
from chatcache.decoding.validation import validate_params
from chatcache.errors import ContextLengthError, InvalidRequestError
from chatcache.scheduler.fairness import PRIORITY, SCHEDULING_POLICIES
from chatcache.scheduler.preemption import PREEMPTION_MODES, SWAP
from chatcache.scheduler.queue import WaitingQueue
from chatcache.scheduler.request import LiveRequest, max_tokens_that_fit, worst_case_pages
from chatcache.types.actions import Strategy
from chatcache.types.plan import KVCapacity
from chatcache.types.queue_limits import QueueSize, check_queue, check_tenant_share
from chatcache.types.request import (
    MAX_PRIORITY,
    MAX_PROMPT_LOGPROBS,
    BeamSearchParams,
    GenerateRequest,
    Params,
    num_branches,
)
from chatcache.types.stats import ModelInfo

MAX_REQUEST_ID_CHARS = 256


def check_request_id(request_id: str) -> None:
    """Raises: InvalidRequestError."""
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} characters", param="request_id")


def check_priority(priority: int) -> None:
    """Raises: InvalidRequestError."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError(f"priority must be an integer, got {priority!r:.100}", param="priority")
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, got {priority}", param="priority"
        )


def check_policies(config: EngineConfig, capacity: KVCapacity) -> None:
    """Verify the words that choose a policy.

    Raises: InvalidRequestError.
    """
    choices = (
        ("scheduling_policy", config.scheduling_policy, SCHEDULING_POLICIES),
        ("preemption_mode", config.preemption_mode, PREEMPTION_MODES),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise InvalidRequestError(f"{name} must be one of {', '.join(allowed)}, got {value!r}", param=name)
    if config.preemption_mode == SWAP and not capacity.num_host_pages:
        raise InvalidRequestError(
            "preemption_mode 'swap' needs host memory for swapped pages, and there is none (see swap_space_bytes)",
            param="preemption_mode",
        )


def check_prompt(prompt: Sequence[int], num_public_tokens: int, vocab_size: int, max_model_len: int) -> None:
    """Verify a prompt and how much of it is public.

    Raises: InvalidRequestError, ContextLengthError.
    """
    if not prompt:
        raise InvalidRequestError("the prompt is empty; it needs at least 1 token", param="prompt")
    if len(prompt) >= max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens, and at least 1 is to be generated; "
            f"this model's maximum context length is {max_model_len} tokens",
            param="prompt",
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        worst = next(token for token in prompt if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"prompt token ids must be between 0 and {vocab_size - 1}, got {worst}", param="prompt"
        )
    if not 0 <= num_public_tokens <= len(prompt):
        raise InvalidRequestError(
            f"num_public_tokens must be between 0 and the prompt's {len(prompt)} tokens, got {num_public_tokens}",
            param="num_public_tokens",
        )


def check_prompt_logprobs(request: GenerateRequest) -> None:
    """Verify that what is asked of the prompt fits one answer; the parameters are valid.

    Raises: InvalidRequestError.
    """
    num_top = request.params.prompt_logprobs
    if num_top is not None and len(request.prompt) * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs {num_top} of {len(request.prompt)} prompt tokens is more than one answer carries: prompt "
            f"tokens x (prompt_logprobs + 1) must be at most {MAX_PROMPT_LOGPROBS}",
            param="prompt_logprobs",
        )


def check_branches(params: Params, most: int) -> None:
    """Verify that all branches can run side by side.

    Raises: InvalidRequestError.
    """
    if num_branches(params) > most:
        if isinstance(params, BeamSearchParams):
            name = "beam_width"
        else:
            name = "n" if params.best_of is None else "best_of"
        raise InvalidRequestError(
            f"{name} must be at most {most} on this server, got {num_branches(params)}", param=name
        )


def resolve_max_tokens(request: GenerateRequest, capacity: KVCapacity, max_model_len: int) -> int:
    """Return how many tokens each branch may generate: what was asked for, or all that context and pool allow.

    Raises: ContextLengthError if that can never fit, even with the whole pool to itself.
    """
    num_prompt, branches, params = len(request.prompt), num_branches(request.params), request.params
    num_pages = capacity.num_pages - 1
    most = max_tokens_that_fit(num_prompt, branches, capacity.page_size, num_pages)
    if params.max_tokens is None and most >= 1:
        return min(max_model_len - num_prompt, most)
    max_tokens = params.max_tokens or 1
    if num_prompt + max_tokens > max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, {num_prompt + max_tokens} in all; "
            f"this model's maximum context length is {max_model_len} tokens",
            param="max_tokens",
        )
    worst = worst_case_pages(num_prompt, max_tokens, branches, capacity.page_size)
    if worst > num_pages:
        raise ContextLengthError(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} in {branches} branches may need {worst} pages of "
            f"{capacity.page_size} tokens; the KV memory has {num_pages}, enough for max_tokens {max(most, 0)}",
            param="max_tokens",
        )
    return max_tokens


class GrammarWaitQueue:
    """In the order of their arrival; one that is slow holds up no other."""

    def __init__(self) -> None:
        self._tickets: dict[LiveRequest, GrammarFuture] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request: LiveRequest) -> bool:
        return request in self._tickets

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self._tickets)

    def of(self, namespace: str) -> tuple[int, int]:
        """Count a namespace's requests, and the tokens of their prompts."""
        sizes = [len(request.prompt) for request in self._tickets if request.namespace == namespace]
        return len(sizes), sum(sizes)

    def add(self, request: LiveRequest, ticket: GrammarFuture) -> None:
        self._tickets[request] = ticket

    def remove(self, request: LiveRequest) -> None:
        """Forget a request; a compile that was to begin for it alone does not, so that nobody waits behind it."""
        ticket = self._tickets.pop(request)
        if all(other.future is not ticket.future for other in self._tickets.values()):
            ticket.cancel()

    def take(self, timeout_s: float) -> Iterator[tuple[LiveRequest, BaseException | None]]:
        """Yield those that are ready, each with what went wrong, if anything did; wait so long for the first."""
        if timeout_s and not any(ticket.is_ready for ticket in self._tickets.values()):
            next(iter(self._tickets.values())).compiler.wait(timeout_s)
        for request, ticket in list(self._tickets.items()):
            if ticket.is_ready:
                del self._tickets[request]
                yield request, ticket.failure()


StrategyFactory = Callable[..., Strategy]


class RequestValidator:
    """Checks requests against one engine's limits and makes live ones of them, numbered as they come.

    `most_branches` may run side by side.
    """

    def __init__(
        self,
        facts: ModelInfo,
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
        self._grammars = GrammarCompiler(token_bytes, facts, special_ids)
        self._make_strategy = make_strategy
        self._num_accepted = 0

    def check(self, request: GenerateRequest) -> int:
        """Verify a request; return how many tokens each of its branches may generate.

        Raises: InvalidRequestError or ContextLengthError for what can never run.
        """
        check_request_id(request.request_id)
        check_priority(request.priority)
        check_prompt(request.prompt, request.num_public_tokens, self._facts.vocab_size, self._max_model_len)
        validate_params(request.params, self._facts.vocab_size)
        check_prompt_logprobs(request)
        check_branches(request.params, self._most_branches)
        return resolve_max_tokens(request, self._capacity, self._max_model_len)

    def check_room(self, request: GenerateRequest, waiting: WaitingQueue, preparing: GrammarWaitQueue) -> None:
        """Verify that a request may wait with these.

        Raises: RateLimitError, OverloadedError when as many requests or prompt tokens wait as may.
        """
        num_tokens, most = (
            len(request.prompt),
            QueueSize(self._config.max_queued_requests, self._config.max_queued_tokens),
        )
        if request.namespace:
            num, size = waiting.namespace_size(request.namespace)
            num_more, size_more = preparing.of(request.namespace)
            check_tenant_share(QueueSize(num + num_more, size + size_more), num_tokens, most)
        everybody = QueueSize(len(waiting) + len(preparing), waiting.num_prompt_tokens + preparing.num_prompt_tokens)
        check_queue(everybody, num_tokens, most)

    def prepare_constraints(self) -> None:
        self._grammars.load_vocabulary()

    def grammar(self, request: GenerateRequest) -> GrammarFuture | None:
        """Begin to compile what the output must match, if it must match anything.

        Raises: InvalidRequestError for what can be told at once.
        """
        outputs = request.params.structured_outputs
        return None if outputs is None else self._grammars.start(outputs, request.namespace)

    def accept(self, request: GenerateRequest, max_tokens: int, ticket: GrammarFuture | None) -> LiveRequest:
        """Make a checked request live.

        Raises: InvalidRequestError for what its strategy cannot do here.
        """
        constrained = {} if ticket is None else {"grammar_future": ticket}
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
            resume_point=request.resume_point,
            num_prompt_top=request.params.prompt_logprobs,
            max_pages=worst_case_pages(len(request.prompt), max_tokens, branches, page_size),
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
