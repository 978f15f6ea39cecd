"""What an engine's pages hold, for those who ask."""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.engine.accounts import page_accounts
from chatcache.engine.admission import check_prompt
from chatcache.engine.namespaces import Namespaces
from chatcache.engine.page_gauge import PageGauge
from chatcache.kv.audit import PageUsage, check, page_usage
from chatcache.kv.chain import Scope
from chatcache.sched.audit import check_tokens
from chatcache.sched.plan import KVCapacity
from chatcache.sched.scheduler import Scheduler
from chatcache.types.pages import Explanation, PackedPrompt, PageAccounts, PageMap


class EnginePages:
    """Answers out of the books of one engine: all are queries, but for `reset_prefix_cache`."""

    def __init__(
        self, scheduler: Scheduler, capacity: KVCapacity, namespaces: Namespaces, *, vocab_size: int, max_model_len: int
    ) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._gauge = PageGauge(scheduler)
        self._page_bytes = capacity.kv_bytes // capacity.num_pages
        self._namespaces = namespaces
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def stats(self) -> PageUsage:
        """Count what the pages are used for. O(pages held): for metrics and tests."""
        return page_usage(self._kv, self._scheduler.tables())

    def accounts(self) -> PageAccounts:
        """Charge the pages in use to requests, conversations and namespaces. O(pages held)."""
        return page_accounts(self._kv, self._scheduler.running, self._page_bytes)

    def num_cached(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]:
        """Count what of each prompt is already computed, as `explain` would."""
        return [self._kv.num_cached(each.tokens, Scope(namespace, each.num_public_tokens)) for each in prompts]

    def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap:
        """Show every page as the namespace may see it, or an `operator` all as they are. A moment old at most."""
        return self._gauge.read(None if operator else namespace)

    def explain(
        self, prompt: Sequence[int], namespace: str = "", num_public_tokens: int = 0, *, operator: bool = False
    ) -> Explanation:
        """Say what of a prompt is already computed, and why not more.

        An `operator` may also learn what (recently seen) other namespaces have computed; a tenant must not.
        Raises: InvalidRequest, ContextTooLong.
        """
        check_prompt(prompt, num_public_tokens, self._vocab_size, self._max_model_len)
        chain = self._kv.chain(prompt, Scope(namespace, num_public_tokens))
        return self._kv.explain(chain, self._namespaces if operator else ())

    def num_held(self, request_id: str) -> int:
        """Count the distinct pages a request holds; 0 if it is unknown or waiting."""
        requests = (request for request in self._scheduler.requests() if request.request_id == request_id)
        return len({page for request in requests for table in request.tables() for page in table.pages()})

    def check(self) -> None:
        """Verify pages, tables and reference counts against each other. Raises: BrokenInvariant."""
        tables = self._scheduler.tables()
        check(self._kv, tables, [request.host_pages for request in self._scheduler.requests()])
        check_tokens(self._kv, self._scheduler.running)

    def reset_prefix_cache(self) -> bool:
        """Forget all that finished requests left behind; refused (False) while requests run."""
        if self._scheduler.running:
            return False
        self._kv.forget_all()
        return True
