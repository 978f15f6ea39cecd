"""Test the page of a server with API keys: the key is exchanged for a cookie that scripts cannot read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import BUILT_PAGE
from tests.e2e.page_checks import SCREENS, find_problems
from tests.e2e.recorded_page import RecordedPage
from tests.e2e.requirements import require
from tests.gateway.keyed import Keyed, keyed

pytestmark = pytest.mark.slow

KEY = "input[name=key]"
NO_LONGER = "Your API key is no longer valid: it was revoked."


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    require(BUILT_PAGE.is_file(), "the built page", "make web")
    with keyed(tmp_path_factory.mktemp("keys"), sse_keep_alive_interval_s=15) as keys:
        yield keys


@pytest.fixture
def visitor(keys: Keyed, browser: Any) -> Iterator[RecordedPage]:
    """A new visitor at the sign-in page."""
    watched = RecordedPage(browser.new_context(), keys.server.url)
    watched.page.goto(keys.server.url)
    watched.page.wait_for_selector(KEY)
    yield watched
    watched.context.close()


def sign_in(visitor: RecordedPage, key: str) -> None:
    visitor.page.fill(KEY, key)
    visitor.page.click("text=Sign in")


def stored(visitor: RecordedPage) -> str:
    found: str = visitor.page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    return found


def test_key_is_exchanged_for_a_session_once(keys: Keyed, visitor: RecordedPage) -> None:
    sign_in(visitor, "cck_wrong_key")
    visitor.page.wait_for_selector("text=Invalid API key.")
    sign_in(visitor, keys.bob.key)
    visitor.connected()
    visitor.ask("Hello")
    assert keys.bob.key not in stored(visitor) and "chatcache_session" not in stored(visitor)
    cookie = next(each for each in visitor.context.cookies() if each["name"] == "chatcache_session")
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and keys.bob.key not in cookie["value"]
    visitor.reload()  # still signed in
    visitor.ignore_problems()  # the refused requests before the sign-in
    visitor.page.click("[aria-label=Settings]")
    visitor.page.wait_for_selector("text=Signed in as acme/bob.")
    visitor.page.click("text=Sign out")
    visitor.page.wait_for_selector(KEY)
    assert visitor.context.cookies() == []


def test_revoked_key_locks_the_page(keys: Keyed, visitor: RecordedPage) -> None:
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
    visitor.ignore_problems()
    sign_in(visitor, keys.bob.key)
    visitor.connected()
    assert not visitor.page.is_visible(f"text={NO_LONGER}")


def test_ended_session_locks_the_page_with_a_message(
    keys: Keyed, visitor: RecordedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign_in(visitor, keys.bob.key)
    visitor.connected()
    ring = keys.server.gateway.key_cache
    monkeypatch.setattr(ring, "expires_in_s", lambda who: 0.0 if who.expires_at is not None else math.inf)
    visitor.page.reload()
    visitor.page.wait_for_selector("text=Your session has ended.")
    visitor.ignore_problems()
    monkeypatch.undo()
    sign_in(visitor, keys.bob.key)
    visitor.connected()


def test_next_user_sees_nothing_of_the_previous_one(keys: Keyed, visitor: RecordedPage) -> None:
    held = keys.give("acme", "ivy")
    sign_in(visitor, held.key)
    visitor.connected()
    visitor.ask("My secret is a marmot")
    keys.take_away(held)
    visitor.page.wait_for_selector(f"text={NO_LONGER}")
    visitor.ignore_problems()
    sign_in(visitor, keys.bob.key)
    visitor.connected()
    visitor.page.wait_for_selector("text=My secret is a marmot", state="detached")
    assert "#" not in visitor.page.url


@pytest.mark.parametrize("width", list(SCREENS))
def test_sign_in_form_fits_the_screen_and_has_the_focus(width: int, keys: Keyed, browser: Any) -> None:
    context = browser.new_context(**SCREENS[width])
    page = context.new_page()
    page.goto(keys.server.url)
    page.wait_for_selector(KEY)
    assert find_problems(page) == []
    for selector in (KEY, "text=This server requires an API key", "text=Sign in"):
        assert page.locator(selector).is_visible(), selector
    assert page.evaluate("document.activeElement.name") == "key"
    context.close()


def open_administration(visitor: RecordedPage) -> None:
    visitor.page.keyboard.press("Control+,")
    visitor.page.click("button:text('Administration')")
    visitor.page.wait_for_selector(".load")


def cells(visitor: RecordedPage, table: str) -> dict[str, list[str]]:
    """Return the cells of each row of a table by the row's name."""
    rows = visitor.page.locator(f"section[aria-label={table}] tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def test_administrator_sees_load_tenants_users_and_keys(keys: Keyed, visitor: RecordedPage) -> None:
    for by, count in ((keys.ann, 3), (keys.other, 2)):
        for _ in range(count):
            body = {"title": "a marmot", "items": [{"role": "user", "content": "a marmot"}]}
            assert keys.server.request("POST", "/v1/conversations", body, headers=by.bearer)[0] == 200
    limited = keys.give("acme", "cy", name="laptop", requests_per_minute=60, tokens_per_day=1000)
    sign_in(visitor, keys.admin.key)
    visitor.connected()
    visitor.ignore_problems()  # the refused requests before the sign-in
    open_administration(visitor)
    _, _, overview = keys.server.request("GET", "/v1/admin", headers=keys.admin.bearer)
    assert cells(visitor, "Tenants") == {
        each["tenant"]: [str(each["keys"]), str(each["conversations"]), "0"] for each in overview["tenants"]
    }
    users = cells(visitor, "Users")
    assert users["ann"] == ["acme", "3"] and users["(no name)"] == ["other", "2"]
    listed = cells(visitor, "Keys")
    assert listed["laptop"] == ["acme/cy", "0 of 1,000", "60 requests/min"] and len(listed) == len(overview["keys"])
    assert any(name.endswith("revoked") for name in listed)
    assert any(name.endswith("administrator") for name in listed)
    text = visitor.page.inner_text("dialog")
    assert "marmot" not in text and limited.key not in text

    share = visitor.page.locator("[data-figure='From cache']")
    before = share.inner_text()
    question = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "ignore_eos": True}
    for _ in range(3):
        assert keys.server.request("POST", "/v1/chat/completions", question, headers=keys.ann.bearer)[0] == 200
    visitor.page.wait_for_function(
        "([node, before]) => node.textContent !== before", arg=[share.element_handle(), before]
    )
    visitor.page.click("[aria-label='Close the administration']")
    visitor.page.wait_for_selector("dialog", state="detached")


def test_administration_reports_a_failed_reading(keys: Keyed, visitor: RecordedPage) -> None:
    sign_in(visitor, keys.admin.key)
    visitor.connected()
    open_administration(visitor)
    visitor.page.route("**/v1/admin", lambda route: route.abort())
    visitor.page.wait_for_selector("text=These figures are outdated.")
    assert visitor.page.is_visible(".load")
    visitor.page.unroute("**/v1/admin")
    visitor.page.wait_for_selector("text=These figures are outdated.", state="detached")
    visitor.ignore_problems()


def test_users_without_the_right_see_no_administration(keys: Keyed, visitor: RecordedPage) -> None:
    sign_in(visitor, keys.bob.key)
    visitor.connected()
    visitor.ignore_problems()  # the refused requests before the sign-in
    visitor.page.click("[aria-label=Settings]")
    visitor.page.wait_for_selector("text=Signed in as acme/bob.")
    assert not visitor.page.is_visible("text=Administration")


@pytest.mark.parametrize("width", list(SCREENS))
def test_administration_fits_the_screen(width: int, keys: Keyed, browser: Any) -> None:
    visitor = RecordedPage(browser.new_context(**SCREENS[width]), keys.server.url)
    visitor.page.goto(keys.server.url)
    sign_in(visitor, keys.admin.key)
    visitor.connected()
    open_administration(visitor)
    assert find_problems(visitor.page) == []
    visitor.context.close()
