"""Owner names and their tenants."""

from __future__ import annotations

import pytest

from chatcache.auth import namespace_of, owner_name
from chatcache.errors import InvalidRequestError


@pytest.mark.parametrize(("tenant", "user"), [("acme", ""), ("acme", "ann"), ("a.b-c_D9", "x" * 64)])
def test_users_of_a_tenant_own_separately_and_share_a_namespace(tenant: str, user: str) -> None:
    owner = owner_name(tenant, user)
    assert namespace_of(owner) == tenant and (owner == tenant) == (not user)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "é", "x" * 65, "a\n", "\x00", "{a}"])
def test_owner_name_with_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        owner_name(name)
    assert caught.value.param == "tenant"
    if name:
        with pytest.raises(InvalidRequestError):
            owner_name("acme", name)


def test_namespace_of_a_server_without_keys_is_empty() -> None:
    assert namespace_of("") == ""
