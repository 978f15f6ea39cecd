"""Prefill while the user types: compute the prompt of the next turn in an idle engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from chatcache.conversations.tree import new_id
from chatcache.errors import ChatcacheError, RateLimitError
from chatcache.gateway.auth.principal import Principal
from chatcache.gateway.context import Gateway
from chatcache.gateway.errors import INTERNAL_ERROR
from chatcache.gateway.limits.rate_limits import RequestCost
from chatcache.gateway.responses.create import build_turn_request, parse_response_tools
from chatcache.gateway.schemas.fields import parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import ResponseFields
from chatcache.gateway.websocket.frames import CLIENT_GONE, FrameSender
from chatcache.types.events import Failed, Finished, Started
from chatcache.types.request import MAX_PRIORITY, GenerateRequest, SamplingParams

log = logging.getLogger(__name__)

PIECE_TOKENS = 512  # other requests wait for at most one piece


class Prewarmer:
    """Prefills prompts for one connection, one at a time. Nothing is stored."""

    def __init__(self, gateway: Gateway, principal: Principal, sender: FrameSender) -> None:
        self._gateway = gateway
        self._principal = principal
        self._sender = sender
        self._task: asyncio.Task[None] | None = None

    async def start(self, body: Mapping[str, Any]) -> None:
        """Cancel the current prefill and start one for this request."""
        await self.close()
        self._task = asyncio.create_task(self._run(body))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self, body: Mapping[str, Any]) -> None:
        with contextlib.suppress(*CLIENT_GONE):
            try:
                result = await self._prefill(body)
            except Exception as error:
                if not isinstance(error, ChatcacheError):
                    log.exception("prompt.prewarm failed")
                await self._sender.send_error(error if isinstance(error, ChatcacheError) else INTERNAL_ERROR)
                return
            await self._sender.send({"type": "prompt.prewarmed", **result})

    async def _prefill(self, body: Mapping[str, Any]) -> dict[str, object]:
        """Compute the prompt in pieces until it is complete or the engine is busy.

        Raises: as `start_response` for an invalid request.
        """
        fields = parse_fields(body, ResponseFields)
        unknown_fields(body, ResponseFields)
        model = await self._gateway.require_model(fields.model)
        planned = await model.conversations.plan(
            build_turn_request(
                fields, self._principal.owner, self._gateway.model_name, parse_response_tools(model, fields).functions
            )
        )
        prompt = planned.prompt
        num_done, num_cached, is_idle = 0, 0, True
        while num_done < len(prompt.token_ids) and (is_idle := await self._is_idle()):
            prefix = prompt.token_ids[: num_done + PIECE_TOKENS]
            try:
                async with self._gateway.admission.acquire(
                    self._principal, RequestCost(0, max_tokens=0, is_opportunistic=True)
                ) as ticket:
                    ticket.add_tokens(len(prefix))
                    num_cached_here = await self._compute(prefix, prompt.num_public_tokens)
                    ticket.add_tokens(-num_cached_here)
            except RateLimitError:  # prefill is optional, so a rate limit is no error
                is_idle = False
                break
            num_cached = num_cached_here if num_done == 0 else num_cached
            # cached tokens cost nothing: continue after them
            num_done = max(num_done + PIECE_TOKENS, num_cached_here)
        num_input = len(prompt.token_ids)
        return {
            "status": "done" if is_idle else "busy",
            "input_tokens": num_input,
            "cached_tokens": num_cached,
            "warm_tokens": min(num_done, num_input),
        }

    async def _is_idle(self) -> bool:
        if self._gateway.responses.running():  # the engine's health is cached and may be stale
            return False
        health = await self._gateway.health()
        return health.ready and health.num_running == 0 and health.num_waiting == 0

    async def _compute(self, tokens: tuple[int, ...], num_public_tokens: int) -> int:
        """Prefill a prompt in the engine; return how many of its tokens were already cached."""
        engine = self._gateway.engine
        request = GenerateRequest(
            request_id=new_id("warm"),
            prompt=tokens,
            params=SamplingParams(temperature=0.0, max_tokens=1),
            namespace=self._principal.tenant,
            num_public_tokens=min(num_public_tokens, len(tokens)),
            priority=MAX_PRIORITY if self._gateway.scheduling_policy == "priority" else 0,
        )
        await engine.submit(request)
        num_cached = 0
        try:
            async for event in engine.events(request.request_id):
                if isinstance(event, Started | Finished):
                    num_cached = event.num_cached_tokens
                elif isinstance(event, Failed):
                    break
        except BaseException:
            await asyncio.shield(engine.abort(request.request_id))
            raise
        return num_cached
