"""Validation of requests, and their conversion into live requests.

Everything that is decided once per request, when the engine accepts it: its limits, its seed, its decoding strategy and
its grammar. Error messages name the limit and the value that exceeds it. Accepted requests whose grammar is still being
compiled wait in a `GrammarWaitQueue`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from chatcache.config import EngineConfig
from chatcache.decoding.grammar.compiler import GrammarCompiler, GrammarFuture
from chatcache.decoding.pooling import PoolingStrategy, check_pooling
from chatcache.decoding.strategy import validate_params
from chatcache.errors import ContextLengthError, InvalidRequestError
from chatcache.scheduler.fairness import PRIORITY, SCHEDULING_POLICIES
from chatcache.scheduler.preemption import PREEMPTION_MODES, SWAP
from chatcache.scheduler.queue import WaitingQueue
from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.snapshots import message_marks
from chatcache.types.actions import Strategy
from chatcache.types.plan import KVCapacity
from chatcache.types.queue_limits import QueueSize, check_queue, check_tenant_share
from chatcache.types.request import (
    MAX_PRIORITY,
    MAX_PROMPT_LOGPROBS,
    BeamSearchParams,
    GenerateRequest,
    Params,
    format_value,
    num_branches,
    num_gang_branches,
    seed_of,
)
from chatcache.types.stats import ModelInfo

MAX_REQUEST_ID_CHARS = 256

StrategyFactory = Callable[..., Strategy]


def check_request_id(request_id: str) -> None:
    """Verify the type and the length of a request id.

    Raises: InvalidRequestError.
    """
    if not isinstance(request_id, str):
        raise InvalidRequestError(f"request_id must be text, got {request_id!r:.100}", param="request_id")
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} characters", param="request_id")


def check_priority(priority: int) -> None:
    """Verify the type and the range of a priority.

    Raises: InvalidRequestError.
    """
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError(f"priority must be an integer, got {priority!r:.100}", param="priority")
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, got {format_value(priority)}",
            param="priority",
        )


def check_policies(config: EngineConfig, capacity: KVCapacity) -> None:
    """Verify the scheduling policy and the preemption mode of a configuration.

    Raises: InvalidRequestError for an unknown name, or for `swap` without host memory.
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


def check_prompt(
    prompt: Sequence[int], num_public_tokens: int, vocab_size: int, max_model_len: int, *, is_pooled: bool = False
) -> None:
    """Verify the length and token ids of a prompt, and the size of its public prefix.

    `is_pooled`: no token is generated after it. Raises: InvalidRequestError, ContextLengthError.
    """
    if not prompt:
        raise InvalidRequestError("the prompt is empty; it needs at least 1 token", param="prompt")
    if is_pooled and len(prompt) > max_model_len:
        raise ContextLengthError(
            f"the input has {len(prompt)} tokens; this model's maximum context length is {max_model_len} tokens",
            param="prompt",
        )
    if not is_pooled and len(prompt) >= max_model_len:
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
    """Verify the start, and that prompt tokens x (alternatives per token + 1) is at most MAX_PROMPT_LOGPROBS.

    Expects valid sampling parameters. Raises: InvalidRequestError.
    """
    num_top, start = request.params.prompt_logprobs, request.prompt_logprobs_start
    if not 0 <= start <= len(request.prompt):
        raise InvalidRequestError(
            f"prompt_logprobs_start must be between 0 and the prompt's {len(request.prompt)} tokens, got {start}",
            param="prompt_logprobs_start",
        )
    num_tokens = len(request.prompt) - start
    if num_top is not None and num_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs {num_top} of {num_tokens} prompt tokens is more than one answer carries: prompt "
            f"tokens x (prompt_logprobs + 1) must be at most {MAX_PROMPT_LOGPROBS}",
            param="prompt_logprobs",
        )


def check_branches(params: Params, max_branches: int) -> None:
    """Verify that all branches of a request fit one step.

    Raises: InvalidRequestError.
    """
    if num_branches(params) > max_branches:
        if isinstance(params, BeamSearchParams):
            name = "beam_width"
        else:
            name = "n" if params.best_of is None else "best_of"
        raise InvalidRequestError(
            f"{name} must be at most {max_branches} (max_num_seqs), got {num_branches(params)}", param=name
        )


def worst_case_pages(num_prompt_tokens: int, max_tokens: int, num_branches: int, page_size: int) -> int:
    """Return the most pages that a request can hold at once.

    In the worst case nothing is matched and all branches live to the end, sharing only the full pages of the prompt.
    The last sampled token is never computed, so a branch stores at most num_prompt_tokens + max_tokens - 1 tokens.
    """
    num_pages = -(-(num_prompt_tokens + max_tokens - 1) // page_size)
    if max_tokens == 1:
        return num_pages  # no branch writes after the prompt
    num_shared = num_prompt_tokens // page_size
    return num_shared + num_branches * (num_pages - num_shared)


def max_tokens_that_fit(num_prompt_tokens: int, num_branches: int, page_size: int, num_pages: int) -> int:
    """Return the largest `max_tokens` whose worst case fits; less than 1 if none does."""
    num_shared = num_prompt_tokens // page_size
    num_private = (num_pages - num_shared) // num_branches
    max_tokens = (num_shared + num_private) * page_size - num_prompt_tokens + 1
    return max_tokens if max_tokens > 1 else int(num_prompt_tokens <= num_pages * page_size)


def resolve_max_tokens(request: GenerateRequest, capacity: KVCapacity, max_model_len: int) -> int:
    """Return the token limit of each branch: `max_tokens`, or as many as context and pool allow.

    All beams and distinct candidates need their pages together; other candidates can run one after the other.

    Raises: ContextLengthError if the request could not finish even if it had the whole pool.
    """
    num_prompt, branches, params = len(request.prompt), num_gang_branches(request.params), request.params
    num_pages = capacity.num_pages - 1
    if request.pooling is not None:
        if worst_case_pages(num_prompt, 1, 1, capacity.page_size) > num_pages:
            raise ContextLengthError(
                f"the input has {num_prompt} tokens; "
                f"the KV memory has {num_pages} pages of {capacity.page_size} tokens",
                param="prompt",
            )
        return 1
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
        where = f" in {branches} branches" if branches > 1 else ""
        raise ContextLengthError(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens}{where} may need {worst} pages of "
            f"{capacity.page_size} tokens; the KV memory has {num_pages}, enough for max_tokens {max(most, 0)}",
            param="max_tokens",
        )
    return max_tokens


class GrammarWaitQueue:
    """Accepted requests that wait for their grammar to be compiled, in order of arrival.

    A grammar that compiles slowly does not delay the requests after it.
    """

    def __init__(self) -> None:
        self._grammars: dict[LiveRequest, GrammarFuture] = {}

    def __len__(self) -> int:
        return len(self._grammars)

    def __contains__(self, request: LiveRequest) -> bool:
        return request in self._grammars

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self._grammars)

    def namespace_size(self, namespace: str) -> tuple[int, int]:
        """Return the number of a namespace's requests and the number of their prompt tokens."""
        sizes = [len(request.prompt) for request in self._grammars if request.namespace == namespace]
        return len(sizes), sum(sizes)

    def add(self, request: LiveRequest, grammar: GrammarFuture) -> None:
        self._grammars[request] = grammar

    def remove(self, request: LiveRequest) -> None:
        """Remove a request.

        Its compilation is cancelled if it has not begun and no other request needs it.
        """
        grammar = self._grammars.pop(request)
        if all(other.future is not grammar.future for other in self._grammars.values()):
            grammar.cancel()

    def pop_ready(self, timeout_s: float) -> Iterator[tuple[LiveRequest, BaseException | None]]:
        """Remove and yield the requests whose compilation is done, with its error or None.

        Waits up to `timeout_s` if no compilation is done.
        """
        if timeout_s and not any(grammar.is_ready for grammar in self._grammars.values()):
            next(iter(self._grammars.values())).compiler.wait(timeout_s)
        for request, grammar in list(self._grammars.items()):
            if grammar.is_ready:
                del self._grammars[request]
                yield request, grammar.failure()


class RequestValidator:
    """Checks requests against the limits of an engine and creates a `LiveRequest` for each valid one.

    `max_branches`: the most sequences (candidates or beams) of one request, which one step must be able to hold.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        config: EngineConfig,
        capacity: KVCapacity,
        *,
        max_model_len: int,
        max_branches: int,
        token_bytes: Sequence[bytes] | None,
        special_ids: Collection[int],
        make_strategy: StrategyFactory,
    ) -> None:
        self._model_info = model_info
        self._config = config
        self._capacity = capacity
        self._max_model_len = max_model_len
        self._max_branches = max_branches
        self._token_bytes = token_bytes
        self._grammars = GrammarCompiler(token_bytes, model_info, special_ids)
        self._make_strategy = make_strategy
        self._num_accepted = 0

    def check(self, request: GenerateRequest) -> int:
        """Verify a request and return the token limit of each of its branches.

        Raises: InvalidRequestError or ContextLengthError for a request that this engine can never run.
        """
        check_request_id(request.request_id)
        check_priority(request.priority)
        check_prompt(
            request.prompt,
            request.num_public_tokens,
            self._model_info.vocab_size,
            self._max_model_len,
            is_pooled=request.pooling is not None,
        )
        if request.pooling is not None:
            check_pooling(request.pooling, self._model_info)
            return resolve_max_tokens(request, self._capacity, self._max_model_len)
        validate_params(request.params, self._model_info.vocab_size)
        check_prompt_logprobs(request)
        check_branches(request.params, self._max_branches)
        return resolve_max_tokens(request, self._capacity, self._max_model_len)

    def check_queue_limits(self, request: GenerateRequest, waiting: WaitingQueue, compiling: GrammarWaitQueue) -> None:
        """Verify that one more request fits the queue limits, which count both queues.

        Raises: RateLimitError when the namespace has used its share, OverloadedError when the queue is full.
        """
        num_tokens = len(request.prompt)
        limit = QueueSize(self._config.max_queued_requests, self._config.max_queued_tokens)
        if request.namespace:
            num, size = waiting.namespace_size(request.namespace)
            num_more, size_more = compiling.namespace_size(request.namespace)
            check_tenant_share(QueueSize(num + num_more, size + size_more), num_tokens, limit)
        total = QueueSize(len(waiting) + len(compiling), waiting.num_prompt_tokens + compiling.num_prompt_tokens)
        check_queue(total, num_tokens, limit)

    def start_grammar_compiler(self) -> None:
        """Start the grammar compiler before the first request needs it."""
        self._grammars.load_vocabulary()

    def start_grammar(self, request: GenerateRequest) -> GrammarFuture | None:
        """Begin to compile the request's grammar; None for a request without structured outputs.

        Raises: InvalidRequestError for a grammar that is rejected without compiling it.
        """
        outputs = request.params.structured_outputs
        return (
            None if outputs is None or request.pooling is not None else self._grammars.start(outputs, request.namespace)
        )

    def create_request(self, request: GenerateRequest, max_tokens: int, grammar: GrammarFuture | None) -> LiveRequest:
        """Create the live request of a checked request.

        Raises: InvalidRequestError for parameters that its decoding strategy does not support.
        """
        pooler = PoolingStrategy(request, self._model_info) if request.pooling is not None else None
        constrained = {} if grammar is None else {"grammar_future": grammar}
        strategy = pooler or self._make_strategy(
            request,
            self._model_info,
            seed=seed_of(request, self._config.seed),
            max_tokens=max_tokens,
            token_bytes=self._token_bytes,
            **constrained,
        )
        live = LiveRequest(
            request.request_id,
            request.prompt,
            request.namespace,
            strategy,
            self._num_accepted,
            num_public_tokens=request.num_public_tokens,
            cache_salt=request.cache_salt,
            conversation_id=request.conversation_id,
            priority=request.priority if self._config.scheduling_policy == PRIORITY else 0,
            fork_of=request.fork_of,
            explain=request.explain,
            resume_point=request.resume_point,
            marks=message_marks(request, self._model_info.eos_token_ids) if self._capacity.num_states else (),
            num_prompt_top=request.params.prompt_logprobs if pooler is None else None,
            prompt_scores_start=request.prompt_logprobs_start,
            pooler=pooler,
        )
        self._num_accepted += 1
        return live
