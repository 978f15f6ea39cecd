"""Owners and their tenants."""

from __future__ import annotations

import pytest

from chatcache.auth import namespace_of, owner_name
from chatcache.errors import InvalidRequestError


@pytest.mark.parametrize(("tenant", "user"), [("acme", ""), ("acme", "ann"), ("a.b-c_D9", "x" * 64)])
def test_users_of_a_tenant_own_apart_and_share_pages(tenant: str, user: str) -> None:
    owner = owner_name(tenant, user)
    assert namespace_of(owner) == tenant and (owner == tenant) == (not user)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "é", "x" * 65, "a\n", "\x00", "{a}"])
def test_a_name_that_could_mean_another_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        owner_name(name)
    assert caught.value.param == "tenant"
    if name:
        with pytest.raises(InvalidRequestError):
            owner_name("acme", name)


def test_the_open_server_has_one_namespace() -> None:
    assert namespace_of("") == ""
