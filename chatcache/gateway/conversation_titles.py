"""POST /v1/conversations/{id}/title: a name from the model, for the price of asking."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chatcache.chat.events import ReplyDone, ReplyFinished
from chatcache.chat.service import Reply
from chatcache.chat.side_tasks import TITLE, SideTasks, clean_title
from chatcache.chat.store import ConversationStore, StaleRevision
from chatcache.chat.tree import Conversation, Usage
from chatcache.errors import EngineFault
from chatcache.gateway.body import read_json_or_nothing, until_disconnect
from chatcache.gateway.context import gateway_of
from chatcache.gateway.conversations import store_of, usage_json
from chatcache.gateway.door import CHARS_PER_TOKEN
from chatcache.gateway.errors import json_response
from chatcache.gateway.fields import ignored_header, read, unknown_fields
from chatcache.gateway.heads import conversation_json
from chatcache.gateway.limits import Work
from chatcache.gateway.metering import metered
from chatcache.gateway.metrics import Metrics
from chatcache.gateway.principal import principal_of
from chatcache.gateway.wire import TitleFields


async def name_conversation(request: Request) -> Response:
    """Ask the model for a title and store it, unless it says nothing useful or somebody was faster."""
    gateway, store, principal = gateway_of(request), store_of(request), principal_of(request)
    owner = principal.owner
    body = await read_json_or_nothing(request)
    fields = read(body, TitleFields)
    ignored = unknown_fields(body, TitleFields)
    model = await gateway.ready(fields.model)
    tree = await store.load(owner, request.path_params["id"])
    before = tree.conversation
    if fields.rev is not None and fields.rev != before.rev:
        raise StaleRevision(before, fields.rev)
    tasks = SideTasks(model.conversations, model.service)
    work = Work(len(TITLE.question) // CHARS_PER_TOKEN, max_tokens=TITLE.max_tokens)
    async with gateway.door.entering(principal, work) as permit:
        reply = await tasks.start(TITLE, tree, gateway.model_name, gateway.lowest_priority)
        permit.cover(reply)
    text, usage = await until_disconnect(request, _heard(reply, gateway.metrics))
    title = clean_title(text)
    conversation = await _named(store, before, title) if title else await store.get(owner, before.id)
    if conversation.rev != before.rev:
        gateway.hub.changed(conversation)
    answer = {
        "object": "conversation.title",
        "title": conversation.title,
        "generated": bool(title) and conversation.title == title,
        "usage": usage_json(usage),
        "conversation": conversation_json(conversation),
    }
    return json_response(answer, headers=ignored_header(ignored))


async def _heard(reply: Reply, metrics: Metrics) -> tuple[str, Usage]:
    """What was said, and what it took."""
    text = ""
    async with reply:
        async for event in metered(reply, metrics):
            if isinstance(event, ReplyDone):
                text = event.text
            elif isinstance(event, ReplyFinished):
                return text, Usage(event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens)
    raise EngineFault("the engine stopped without saying why")


async def _named(store: ConversationStore, before: Conversation, title: str) -> Conversation:
    """Store a title, whatever else has changed since `before`; but a name that somebody gave it meanwhile stays."""
    present = before
    while present.title == before.title != title:
        try:
            return await store.update(before.owner, before.id, title=title, expect=present.rev)
        except StaleRevision as stale:
            present = stale.present
    return present
