"""Why a prompt misses the cache, as people are told."""

from __future__ import annotations

from chatcache.chat.prompt import Divergence

TEMPLATE_CHANGED = "template_changed"


def miss_json(
    reason: str, at_token: int, detail: str, divergence: Divergence | None, page_size: int
) -> dict[str, object]:
    """What misses from where the chat template left a reply of ours misses for that."""
    if divergence is not None and divergence.at_token - page_size < at_token <= divergence.at_token:
        written = f"message {divergence.message} otherwise than it was when a reply was generated"
        reason, detail = TEMPLATE_CHANGED, f"the chat template writes {written}"
    return {"reason": reason, "at_token": at_token, "detail": detail}
