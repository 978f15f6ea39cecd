"""What is refused at the door, with the numbers in the message."""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.config import EngineConfig
from chatcache.errors import ContextTooLong, InvalidRequest
from chatcache.sched.cost import PREEMPTIONS, SWAP
from chatcache.sched.fairness import SCHEDULING_POLICIES
from chatcache.sched.limits import most_tokens, worst_case_pages
from chatcache.sched.plan import KVCapacity
from chatcache.types.params import MAX_PROMPT_LOGPROBS, BeamSearchParams, Params, num_branches
from chatcache.types.request import MAX_PRIORITY, GenerateRequest

MAX_REQUEST_ID_CHARS = 256


def check_request_id(request_id: str) -> None:
    """Raises: InvalidRequest."""
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} characters", param="request_id")


def check_priority(priority: int) -> None:
    """Raises: InvalidRequest."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequest(f"priority must be an integer, got {priority!r:.100}", param="priority")
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, got {priority}", param="priority"
        )


def check_policies(config: EngineConfig, capacity: KVCapacity) -> None:
    """Verify the words that choose a policy.

    Raises: InvalidRequest.
    """
    choices = (
        ("scheduling_policy", config.scheduling_policy, SCHEDULING_POLICIES),
        ("preemption", config.preemption, PREEMPTIONS),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise InvalidRequest(f"{name} must be one of {', '.join(allowed)}, got {value!r}", param=name)
    if config.preemption == SWAP and not capacity.num_host_pages:
        raise InvalidRequest(
            "preemption 'swap' needs host memory for swapped pages, and there is none (see swap_memory_bytes)",
            param="preemption",
        )


def check_prompt(prompt: Sequence[int], num_public_tokens: int, vocab_size: int, max_model_len: int) -> None:
    """Verify a prompt and how much of it is public.

    Raises: InvalidRequest, ContextTooLong.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty; it needs at least 1 token", param="prompt")
    if len(prompt) >= max_model_len:
        raise ContextTooLong(
            f"the prompt has {len(prompt)} tokens, and at least 1 is to be generated; "
            f"this model's maximum context length is {max_model_len} tokens",
            param="prompt",
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        worst = next(token for token in prompt if not 0 <= token < vocab_size)
        raise InvalidRequest(f"prompt token ids must be between 0 and {vocab_size - 1}, got {worst}", param="prompt")
    if not 0 <= num_public_tokens <= len(prompt):
        raise InvalidRequest(
            f"num_public_tokens must be between 0 and the prompt's {len(prompt)} tokens, got {num_public_tokens}",
            param="num_public_tokens",
        )


def check_prompt_logprobs(request: GenerateRequest) -> None:
    """Verify that what is asked of the prompt fits one answer; the parameters are valid.

    Raises: InvalidRequest.
    """
    num_top = request.params.prompt_logprobs
    if num_top is not None and len(request.prompt) * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs {num_top} of {len(request.prompt)} prompt tokens is more than one answer carries: prompt "
            f"tokens x (prompt_logprobs + 1) must be at most {MAX_PROMPT_LOGPROBS}",
            param="prompt_logprobs",
        )


def check_branches(params: Params, most: int) -> None:
    """Verify that all branches can run side by side.

    Raises: InvalidRequest.
    """
    if num_branches(params) > most:
        if isinstance(params, BeamSearchParams):
            name = "beam_width"
        else:
            name = "n" if params.best_of is None else "best_of"
        raise InvalidRequest(f"{name} must be at most {most} on this server, got {num_branches(params)}", param=name)


def resolve_max_tokens(request: GenerateRequest, capacity: KVCapacity, max_model_len: int) -> int:
    """Return how many tokens each branch may generate: what was asked for, or all that context and pool allow.

    Raises: ContextTooLong if that can never fit, even with the whole pool to itself.
    """
    num_prompt, branches, params = len(request.prompt), num_branches(request.params), request.params
    num_pages = capacity.num_pages - 1
    most = most_tokens(num_prompt, branches, capacity.page_size, num_pages)
    if params.max_tokens is None and most >= 1:
        return min(max_model_len - num_prompt, most)
    max_tokens = params.max_tokens or 1
    if num_prompt + max_tokens > max_model_len:
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, {num_prompt + max_tokens} in all; "
            f"this model's maximum context length is {max_model_len} tokens",
            param="max_tokens",
        )
    worst = worst_case_pages(num_prompt, max_tokens, branches, capacity.page_size)
    if worst > num_pages:
        raise ContextTooLong(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} in {branches} branches may need {worst} pages of "
            f"{capacity.page_size} tokens; the KV memory has {num_pages}, enough for max_tokens {max(most, 0)}",
            param="max_tokens",
        )
    return max_tokens
