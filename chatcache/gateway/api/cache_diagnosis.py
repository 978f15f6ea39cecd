"""Prompt cache diagnosis: why a prompt could not reuse the pages of an earlier request's.

OpenAI's dialect is `prompt_cache_diagnostics` of a response, Anthropic's `diagnostics` of a message. Both compare the
prompt with that of a request that the client names; the cached part and the first miss are looked up in the engine as
for /v1/cache/explain, before the request runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chatcache.conversations.prompt import Prompt
from chatcache.conversations.prompt_history import Comparison, PromptRecord, compare
from chatcache.gateway.auth.principal import Principal
from chatcache.gateway.context import Gateway
from chatcache.gateway.responses.objects import miss_cause
from chatcache.gateway.schemas.anthropic import CacheMissReason, MessageDiagnostics
from chatcache.gateway.schemas.responses import PromptCacheDiagnostics
from chatcache.gateway.schemas.server import CacheLookup
from chatcache.types.stats import ExplainQuery

_MESSAGES_TYPES: dict[str, Literal["system_changed", "tools_changed", "messages_changed"]] = {
    "system": "system_changed",
    "tools": "tools_changed",
    "messages": "messages_changed",
    "compacted": "messages_changed",
}
_RESPONSES_REASONS: dict[str, Literal["input_changed", "tools_changed", "context_compacted"]] = {
    "system": "input_changed",
    "tools": "tools_changed",
    "messages": "input_changed",
    "compacted": "context_compacted",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The comparison with an earlier prompt, None if that is unknown, and what the cache holds of the new one."""

    comparison: Comparison | None
    lookup: CacheLookup
    page_size: int

    @property
    def is_evicted(self) -> bool:
        """Whether pages that both prompts have in common are not cached any more."""
        num_reusable = self.comparison.num_reusable if self.comparison is not None else 0
        return self.lookup.cached_tokens <= num_reusable - self.page_size


async def diagnose(
    gateway: Gateway,
    principal: Principal,
    prompt: Prompt,
    record: PromptRecord,
    earlier_id: str,
    cache_salt: str = "",
) -> Diagnosis:
    """Compare a prompt with that of an earlier request of the owner, and look it up in the cache."""
    query = ExplainQuery(
        tuple(prompt.token_ids), principal.tenant, prompt.num_public_tokens, cache_salt, operator=gateway.is_open
    )
    found = await gateway.engine.explain(query)
    miss = None
    if found.reason:
        miss = miss_cause(found.reason, found.at_token, found.detail, prompt.divergence, found.page_size)
    earlier = gateway.prompt_history.find(principal.owner, earlier_id)
    comparison = compare(earlier, record, found.page_size) if earlier is not None else None
    return Diagnosis(comparison, CacheLookup(found.num_tokens, found.num_cached_tokens, miss), found.page_size)


def message_diagnostics(diagnosis: Diagnosis) -> MessageDiagnostics | None:
    """Return Anthropic's `diagnostics`; None if the whole earlier prompt was reused."""
    comparison = diagnosis.comparison
    if comparison is None:
        return MessageDiagnostics(CacheMissReason("previous_message_not_found"), diagnosis.lookup)
    kind = _MESSAGES_TYPES.get(comparison.change or "")
    if kind is not None:
        return MessageDiagnostics(CacheMissReason(kind, comparison.num_missed), diagnosis.lookup)
    if comparison.change is not None or diagnosis.is_evicted:
        return MessageDiagnostics(CacheMissReason("unavailable"), diagnosis.lookup)
    return None


def response_diagnostics(diagnosis: Diagnosis) -> PromptCacheDiagnostics:
    """Return OpenAI's `prompt_cache_diagnostics`."""
    comparison, lookup = diagnosis.comparison, diagnosis.lookup
    if comparison is None:
        return PromptCacheDiagnostics("comparison_response_not_found", lookup)
    reason = _RESPONSES_REASONS.get(comparison.change or "")
    if reason is not None:
        return PromptCacheDiagnostics("cache_miss", lookup, reason, comparison.num_missed, comparison.num_reusable)
    if comparison.change is not None or diagnosis.is_evicted:
        return PromptCacheDiagnostics("unavailable", lookup)
    return PromptCacheDiagnostics("cache_hit", lookup)
