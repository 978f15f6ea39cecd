"""What to continue: one prompt, and who asks."""

from __future__ import annotations

import msgspec

from chatcache.types.params import Params

MAX_PRIORITY = 2**11 - 1


class ForkPoint(msgspec.Struct, frozen=True):
    """Candidate `index` of a request that may still be running."""

    request_id: str
    index: int = 0


class ToldCandidate(msgspec.Struct, frozen=True):
    """Candidate `index` as far as it was told: its tokens (little-endian int32), the score of its last `Tokens`."""

    index: int
    tokens: bytes = b""
    score: float = 0.0
    is_done: bool = False


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that has died told of a request, for the next one to go on behind event `last_seq`.

    `num_cached_tokens` as of `Started`, None if that was not told. `candidates`: all of them, once anything was.
    """

    last_seq: int = 0
    num_cached_tokens: int | None = None
    candidates: tuple[ToldCandidate, ...] = ()


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. `namespace` comes from the authenticated tenant on the server, never from a client.

    `num_public_tokens`: leading tokens (an operator-declared system prompt) whose full pages every namespace shares.
    `conversation_id` groups requests for accounting only. `priority`: smaller is served sooner (under
    `scheduling_policy="priority"`). `fork_of`: a hint that the prompt begins like that candidate, of the same
    namespace; while it runs its pages are forked as they are, else the hint changes nothing. `explain`: tell in
    `Started` what the start found in the cache, and why not more. `resumed`: it was accepted before, by an engine that
    died.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: Params
    namespace: str = ""
    num_public_tokens: int = 0
    conversation_id: str = ""
    priority: int = 0
    fork_of: ForkPoint | None = None
    explain: bool = False
    resumed: Resumed | None = None
