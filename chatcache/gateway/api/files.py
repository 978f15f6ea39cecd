"""Export and import of conversations as files: our JSON, Markdown, HTML, and exports of other programs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import ConversationTree, Item
from chatcache.errors import ChatcacheError, InvalidRequestError, NotFoundError
from chatcache.gateway.api.conversations import store_of
from chatcache.gateway.auth.principal import owner_of
from chatcache.gateway.context import Gateway, Model, gateway_of
from chatcache.gateway.errors import UnsupportedMediaTypeError, error_body, json_response
from chatcache.gateway.json_codec import JsonObjectSplitter
from chatcache.gateway.middleware import cancel_on_disconnect, reject_encoding
from chatcache.gateway.schemas.responses import Import, ImportEntry
from chatcache.transfer.draft import Draft
from chatcache.transfer.format import ExportWriter, branch_markdown, tree_markdown
from chatcache.transfer.html import branch_html
from chatcache.transfer.importer import ImportResult, import_draft, read_draft
from chatcache.transfer.token_check import TokenCheck

JSON_LINES = "application/x-ndjson"
MARKDOWN = "text/markdown; charset=utf-8"
HTML = "text/html; charset=utf-8"
ALL = "all"
MAX_REPORTED = 1000
_IMPORTED_TYPES = ("application/json", JSON_LINES, "application/jsonl", "application/octet-stream")
_PAGE = 100
_FEED_BYTES = 1 << 18


async def export_conversation(request: Request) -> Response:
    """GET /v1/conversations/{id}/export: lossless JSON, or Markdown or one HTML file to read."""
    file_format = request.query_params.get("format", "json")
    if file_format not in ("json", "markdown", "html"):
        raise InvalidRequestError('format must be "json", "markdown" or "html"', param="format")
    tree = await store_of(request).load(owner_of(request), request.path_params["id"])
    items = _select_branch(tree, request.query_params.get("branch"), whole=file_format == "json")
    if file_format == "json":
        digest = await _tokenizer_digest(request)
        wanted = items if items is not None else tuple(tree.items.values())
        data = await asyncio.to_thread(ExportWriter(digest).conversation, tree, wanted)
        return _file(data, "application/json", f"{tree.conversation.id}.json")
    if file_format == "html":
        if items is None:
            raise InvalidRequestError("an HTML file has one branch: name its last message", param="branch")
        page = await asyncio.to_thread(branch_html, tree.conversation.title, items)
        return _file(page.encode("utf-8", "replace"), HTML, f"{tree.conversation.id}.html")
    if items is None:
        text = await asyncio.to_thread(tree_markdown, tree)
    else:
        text = await asyncio.to_thread(branch_markdown, tree.conversation.title, items)
    return _file(text.encode("utf-8", "replace"), MARKDOWN, f"{tree.conversation.id}.md")


async def export_all(request: Request) -> Response:
    """GET /v1/conversations/export: all conversations, one per line, one in memory at a time."""
    store, owner, digest = store_of(request), owner_of(request), await _tokenizer_digest(request)
    headers = {"content-disposition": 'attachment; filename="conversations.jsonl"'}
    return StreamingResponse(_export_lines(store, owner, digest), media_type=JSON_LINES, headers=headers)


async def import_conversations(request: Request) -> Response:
    """POST /v1/conversations/import: import our files or ChatGPT's while they arrive.

    Each conversation is imported completely or not at all. Raises: InvalidRequestError if none could be imported.
    """
    _check_media_type(request)
    dry_run = _parse_flag(request, "dry_run")
    gateway = gateway_of(request)
    model = await gateway.require_model(None)
    importer = Importer(store_of(request), owner_of(request), model, gateway, dry_run=dry_run)
    values, buffer = JsonObjectSplitter(), bytearray()
    try:
        async for chunk in request.stream():
            buffer += chunk
            if len(buffer) >= _FEED_BYTES:
                await importer.add(await asyncio.to_thread(values.feed, bytes(buffer)))
                buffer.clear()
        await cancel_on_disconnect(request, importer.add(await asyncio.to_thread(values.feed, bytes(buffer))))
        values.end()
    except InvalidRequestError as error:
        importer.add_failure(error)
    return json_response(importer.report())


class Importer:
    """Imports conversations into a tenant's store and records the results."""

    def __init__(self, store: ConversationStore, owner: str, model: Model, gateway: Gateway, *, dry_run: bool) -> None:
        self._store = store
        self._owner = owner
        self._tokenizer = model.tokenizer
        self._check = TokenCheck(model.conversations, model.tokenizer, model.service.reply_format)
        self._hub = gateway.hub
        self._throttle = gateway.tokenize_throttle
        self._dry_run = dry_run
        self._counts: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._num_items = 0
        self._entries: list[ImportEntry] = []
        self._first_error: ChatcacheError | None = None

    async def add(self, files: list[bytes]) -> None:
        """Import the conversations of these JSON documents, in order."""
        for data in files:
            try:
                draft = await asyncio.to_thread(read_draft, data, self._owner, self._tokenizer)
                if draft is not None:
                    async with self._throttle.acquire(self._owner, len(data)):
                        result = await import_draft(self._store, draft, self._check, dry_run=self._dry_run)
                    self._record_import(draft, result)
            except (InvalidRequestError, NotFoundError) as error:
                self.add_failure(error)

    def add_failure(self, error: ChatcacheError) -> None:
        """Record a conversation that could not be imported."""
        if self._first_error is None:
            self._first_error = error
        self._append_entry(ImportEntry(self._num_conversations, "failed", error=error_body(error)))

    @property
    def _num_conversations(self) -> int:
        return sum(self._counts.values())

    def report(self) -> Import:
        """Build the response body.

        Raises: the first error, if nothing was imported and something failed.
        """
        num_done = self._num_conversations - self._counts["failed"]
        if self._first_error is not None and not num_done:
            raise self._first_error
        return Import(
            object="conversation.import",
            dry_run=self._dry_run,
            created=self._counts["created"],
            extended=self._counts["extended"],
            unchanged=self._counts["unchanged"],
            failed=self._counts["failed"],
            num_items=self._num_items,
            skipped=dict(self._skipped),
            data=self._entries,
            has_more=self._num_conversations > len(self._entries),
        )

    def _record_import(self, draft: Draft, result: ImportResult) -> None:
        self._num_items += result.num_items
        self._skipped.update(draft.skipped)
        if result.status != "unchanged" and not self._dry_run:
            self._hub.publish_update(result.conversation)
        self._append_entry(
            ImportEntry(
                self._num_conversations,
                cast(Any, result.status),
                id=result.conversation.id,
                source_id=draft.conversation.id[:128],
                title=result.conversation.title,
                num_items=result.num_items,
                token_exact=result.is_exact,
                skipped=dict(draft.skipped),
            )
        )

    def _append_entry(self, entry: ImportEntry) -> None:
        self._counts[entry.status] += 1
        if len(self._entries) < MAX_REPORTED:
            self._entries.append(entry)


async def _export_lines(store: ConversationStore, owner: str, digest: str) -> AsyncIterator[bytes]:
    after: str | None = None
    writer = ExportWriter(digest)
    while ids := await store.list_ids(owner, _PAGE, after):
        for conversation_id in ids:
            try:
                tree = await store.load(owner, conversation_id)
            except NotFoundError:  # deleted meanwhile
                continue
            yield await asyncio.to_thread(writer.conversation, tree, tuple(tree.items.values()))
        after = ids[-1]
    yield writer.end()[1]


def _select_branch(tree: ConversationTree, branch: str | None, *, whole: bool) -> tuple[Item, ...] | None:
    """Return the messages on the path to `branch`; None for the whole tree.

    Without `branch`: the whole tree if `whole` is set, else the path to the active leaf.
    """
    if branch == ALL or (branch is None and whole):
        return None
    if branch is not None and branch not in tree.items:
        raise NotFoundError(f"no message {branch[:128]!r} in this conversation", param="branch")
    return tree.path(branch if branch is not None else tree.conversation.active_leaf)


async def _tokenizer_digest(request: Request) -> str:
    """Digest of the tokenizer that the stored token ids belong to."""
    tokenizer = (await gateway_of(request).require_model(None)).tokenizer
    return await asyncio.to_thread(lambda: tokenizer.digest)


def _file(data: bytes, media_type: str, name: str) -> Response:
    return Response(data, media_type=media_type, headers={"content-disposition": f'attachment; filename="{name}"'})


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _IMPORTED_TYPES:
        raise UnsupportedMediaTypeError(f"send the file with one of these content types: {', '.join(_IMPORTED_TYPES)}")
    reject_encoding(request)


def _parse_flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidRequestError(f"{name} must be true or false", param=name)
    return text == "true"
