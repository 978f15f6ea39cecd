"""The page of a server with keys: a key once, then a cookie; nothing that a script or the next visitor finds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import BUILT_PAGE
from tests.e2e.recorded_page import Watched
from tests.e2e.requirements import need
from tests.gateway.keyed import Keyed, keyed

pytestmark = pytest.mark.slow

KEY = "input[name=key]"
NO_LONGER = "Your API key is no longer valid: it was revoked."


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    need(BUILT_PAGE.is_file(), "the built page", "make web")
    with keyed(tmp_path_factory.mktemp("keys"), sse_keep_alive_interval_s=15) as keys:
        yield keys


@pytest.fixture
def visitor(keys: Keyed, browser: Any) -> Iterator[Watched]:
    """A new one at the locked door."""
    watched = Watched(browser.new_context(), keys.server.url)
    watched.page.goto(keys.server.url)
    watched.page.wait_for_selector(KEY)
    yield watched
    watched.context.close()


def sign_in(visitor: Watched, key: str) -> None:
    visitor.page.fill(KEY, key)
    visitor.page.click("text=Sign in")


def stored(visitor: Watched) -> str:
    found: str = visitor.page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    return found


def test_a_key_is_handed_in_once(keys: Keyed, visitor: Watched) -> None:
    sign_in(visitor, "cck_wrong_key")
    visitor.page.wait_for_selector("text=Invalid API key.")
    sign_in(visitor, keys.bob.key)
    visitor.connected()
    visitor.ask("Hello")
    assert keys.bob.key not in stored(visitor) and "chatcache_session" not in stored(visitor)
    cookie = next(each for each in visitor.context.cookies() if each["name"] == "chatcache_session")
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and keys.bob.key not in cookie["value"]
    visitor.reload()  # still in
    visitor.forgive()  # the refusals before the key
    visitor.page.click("[aria-label=Settings]")
    visitor.page.wait_for_selector("text=Signed in as acme/bob.")
    visitor.page.click("text=Sign out")
    visitor.page.wait_for_selector(KEY)
    assert visitor.context.cookies() == []


def test_a_revoked_key_locks_the_page(keys: Keyed, visitor: Watched) -> None:
    held = keys.give("acme", "eve")
    sign_in(visitor, held.key)
    visitor.connected()
    assert not visitor.page.is_visible(f"text={NO_LONGER}")
    keys.take_away(held)
    visitor.page.wait_for_selector(f"text={NO_LONGER}")
    visitor.page.wait_for_selector(KEY)
    visitor.page.reload()
    visitor.page.wait_for_selector(f"text={NO_LONGER}")
    sign_in(visitor, held.key)
    visitor.page.wait_for_selector("text=This key was revoked.")
    visitor.forgive()
    sign_in(visitor, keys.bob.key)
    visitor.connected()
    assert not visitor.page.is_visible(f"text={NO_LONGER}")


def test_a_session_that_ends_locks_the_page_and_says_so(
    keys: Keyed, visitor: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign_in(visitor, keys.bob.key)
    visitor.connected()
    ring = keys.server.gateway.key_cache
    monkeypatch.setattr(ring, "expires_in_s", lambda who: 0.0 if who.expires_at is not None else math.inf)
    visitor.page.reload()
    visitor.page.wait_for_selector("text=Your session has ended.")
    visitor.forgive()
    monkeypatch.undo()
    sign_in(visitor, keys.bob.key)
    visitor.connected()


def test_whoever_signs_in_next_sees_nothing_of_whom_was_here(keys: Keyed, visitor: Watched) -> None:
    held = keys.give("acme", "ivy")
    sign_in(visitor, held.key)
    visitor.connected()
    visitor.ask("My secret is a marmot")
    keys.take_away(held)
    visitor.page.wait_for_selector(f"text={NO_LONGER}")
    visitor.forgive()
    sign_in(visitor, keys.bob.key)
    visitor.connected()
    visitor.page.wait_for_selector("text=My secret is a marmot", state="detached")
    assert "#" not in visitor.page.url
