"""Redis beyond the storage contract: several writers, lost answers, permissions, layout."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import redis
import uvloop
from redis.crc import key_slot

from chatcache.cli.redis_acl import PERMISSIONS
from chatcache.conversations.store import Claim, StoreUnavailableError, StoreUnusableError
from chatcache.conversations.tree import (
    COMPLETED,
    DELETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    Conversation,
    Item,
    MessageDeletion,
    ResponseElsewhereError,
    Turn,
    Usage,
    plan_message_deletion,
)
from chatcache.storage import redis_layout
from chatcache.storage.redis import RedisStore
from tests.chaos.processes import with_port
from tests.chaos.proxy import proxied
from tests.gateway.documents import DOCS
from tests.support.redis_servers import RedisServer, answers, until

HEAD = Conversation("conv", "me", 1.0, 1.0)
ENDED = Turn("resp", "", "m", 1.0, status=COMPLETED, usage=Usage(1, 0, 1))


async def test_dead_gateway_leaves_its_responses_incomplete_and_others_running(empty_redis: RedisServer) -> None:
    alive, dying = (RedisStore(empty_redis.url, lease_s=1.5) for _ in range(2))
    await alive.create(HEAD, turn=Turn("resp_a", "", "m", 1.0))
    await dying.append("me", "conv", [], Turn("resp_b", "", "m", 1.0))
    assert dying._heartbeats._loop_task is not None
    dying._heartbeats._loop_task.cancel()  # as good as dead: it renews nothing any more

    async def is_swept() -> bool:
        return (await alive.load("me", "conv")).turns["resp_b"].status == INCOMPLETE

    await until(is_swept, "the dead one's response to be incomplete")
    assert (await alive.load("me", "conv")).turns["resp_a"].status == IN_PROGRESS
    assert set(empty_redis.admin.hgetall(redis_layout.RUNNING_KEY)) == {b"resp_a"}
    await dying.append("me", "conv", [], Turn("resp_b", "", "m", 1.0, status=COMPLETED))  # it was only slow
    assert (await alive.load("me", "conv")).turns["resp_b"].status == COMPLETED
    await alive.close()
    third = RedisStore(empty_redis.url, lease_s=1.5)  # who leaves in order is known to be gone at once

    async def is_free() -> bool:
        return (await third.load("me", "conv")).turns["resp_a"].status == INCOMPLETE

    await until(is_free, "the left response to be incomplete")
    for store in (third, dying):
        await store.close()


async def test_response_that_its_gateway_gives_up_ends_unless_another_one_takes_it_over(
    empty_redis: RedisServer,
) -> None:
    first, second = (RedisStore(empty_redis.url, lease_s=4.0) for _ in range(2))
    await first.create(HEAD, turn=Turn("resp_taken", "", "m", 1.0))
    for name in ("resp_left", "resp_kept"):
        await first.append("me", "conv", [], Turn(name, "", "m", 1.0))
    first.channel.give_up("resp_taken")
    first.channel.give_up("resp_left")
    await first._heartbeats._end_orphaned()
    assert await second.channel.find_runner("resp_taken") == first.channel.name, "it may be taken over"
    assert await second.channel.take_over("conv", "resp_taken", 1)

    async def has_ended() -> bool:
        return (await second.load("me", "conv")).turns["resp_left"].status == INCOMPLETE

    await until(has_ended, "the response that no gateway runs to be incomplete")
    turns = (await second.load("me", "conv")).turns
    assert [turns[name].status for name in ("resp_taken", "resp_kept")] == [IN_PROGRESS, IN_PROGRESS]
    for store in (first, second):
        await store.close()


async def test_takeover_by_a_gateway_that_was_suspended_meanwhile_is_refused(empty_redis: RedisServer) -> None:
    """Another one has taken the record of the response from it, and runs the response."""
    first, suspended, last = (RedisStore(empty_redis.url) for _ in range(3))
    await first.create(HEAD, turn=Turn("resp", "", "m", 1.0))
    assert await last.channel.take_over("conv", "resp", 2)
    assert not await suspended.channel.take_over("conv", "resp", 1)
    assert await first.channel.find_runner("resp") == last.channel.name
    assert await last.channel.take_over("conv", "resp", 2), "the answer was lost"
    for store in (first, suspended, last):
        await store.close()


@pytest.mark.parametrize("status", [COMPLETED, FAILED, DELETED])
async def test_result_of_a_gateway_that_was_suspended_until_another_one_ended_its_response_is_refused(
    empty_redis: RedisServer, status: str
) -> None:
    ended = ENDED if status == COMPLETED else replace(ENDED, status=status, usage=None)
    suspended, other = (RedisStore(empty_redis.url) for _ in range(2))
    await suspended.create(HEAD, turn=Turn("resp", "", "m", 1.0))
    assert await other.channel.take_over("conv", "resp", 1)
    await other.append("me", "conv", [], ended)
    for late in (replace(ENDED, status=FAILED, usage=None), replace(ENDED, model="late")):
        with pytest.raises(ResponseElsewhereError):
            await suspended.append("me", "conv", [], late)
    assert (await other.load("me", "conv")).turns["resp"] == ended
    await other.delete_messages("me", "conv", MessageDeletion(None, removed_turns=("resp",)))
    with pytest.raises(ResponseElsewhereError):
        await suspended.append("me", "conv", [], ENDED)
    for store in (suspended, other):
        await store.close()


async def test_two_gateways_write_one_conversation_without_losses(empty_redis: RedisServer) -> None:
    stores = [RedisStore(empty_redis.url) for _ in range(2)]
    try:
        await stores[0].create(HEAD)
        work = [
            store.append("me", "conv", [Item(f"msg_{number}_{at}", None, "user", "x")])
            for at, store in enumerate(stores)
            for number in range(60)
        ]
        results = await asyncio.gather(*work)
        assert sorted(result.rev for result in results) == list(range(1, 121))
        assert len((await stores[1].load("me", "conv")).items) == 120
        placed = await stores[0]._connection.run(lambda client: client.hvals(redis_layout.items_key("conv")))
        assert sorted(redis_layout.unpack_item(data).position for data in placed) == list(range(120))
    finally:
        for store in stores:
            await store.close()


async def test_injected_bug_missing_watch_is_detected(
    empty_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without WATCH, the test above finds lost changes."""

    async def watch_nothing(self: Any, *names: str) -> bool:
        return bool(await original(self, "chatcache:nothing"))

    async def execute_later(self: Any, raise_on_error: bool = True) -> Any:
        await asyncio.sleep(0.02)  # the other one has read by then what this one changes
        return await execute(self, raise_on_error)

    original, execute = redis.asyncio.client.Pipeline.watch, redis.asyncio.client.Pipeline.execute
    monkeypatch.setattr(redis.asyncio.client.Pipeline, "execute", execute_later)
    monkeypatch.setattr(redis.asyncio.client.Pipeline, "watch", watch_nothing)
    with pytest.raises(AssertionError):
        await test_two_gateways_write_one_conversation_without_losses(empty_redis)


async def test_change_with_a_lost_answer_is_not_repeated(empty_redis: RedisServer) -> None:
    """The outcome is unknown to the client (here it was stored), so the client must not repeat it by itself."""
    async with proxied(empty_redis.port) as proxy:
        store = await asyncio.to_thread(RedisStore, with_port(empty_redis.url, proxy.port), timeout_s=0.6)
        await store.create(HEAD)

        async def work(pipe: Any) -> None:
            pipe.multi()
            pipe.rpush("chatcache:done", "once")
            proxy.lose()  # the answer, that is: what goes to the server still comes through

        async def is_done() -> bool:
            return bool(empty_redis.admin.llen("chatcache:done"))

        changing = asyncio.create_task(store._connection.transact(["chatcache:watched"], work, order=""))
        await until(is_done, "the change to come through")
        with pytest.raises(StoreUnavailableError):
            await changing
        await proxy.heal()
        await until(lambda: answers(store), "an answer")
        await store.close()
    assert empty_redis.admin.llen("chatcache:done") == 1


async def test_usage_with_a_lost_answer_is_counted_once(empty_redis: RedisServer) -> None:
    """The write was stored, unknown to the client: repeated under the same number it changes nothing."""
    async with proxied(empty_redis.port) as proxy:
        store = await asyncio.to_thread(RedisStore, with_port(empty_redis.url, proxy.port), timeout_s=0.6)
        await store.keys.add_usage(3, {"key_x": 5}, writer="w", number=1)
        transact = store._connection.transact

        async def lossy(watched: Any, work: Any, **more: Any) -> Any:
            async def work_and_lose(pipe: Any) -> None:
                await work(pipe)
                proxy.lose()

            return await transact(watched, work_and_lose, **more)

        async def is_counted() -> bool:
            return bool(empty_redis.admin.hget("chatcache:usage:3", "key_x") == b"12")

        store._connection.transact = lossy  # type: ignore[method-assign]
        adding = asyncio.create_task(store.keys.add_usage(3, {"key_x": 7}, writer="w", number=2))
        await until(is_counted, "the tokens to be counted")
        with pytest.raises(StoreUnavailableError):
            await adding
        await proxy.heal()
        store._connection.transact = transact  # type: ignore[method-assign]
        await until(lambda: answers(store), "an answer")
        await store.keys.add_usage(3, {"key_x": 7}, writer="w", number=2)
        assert await store.keys.usage(3) == {"key_x": 12}
        await store.keys.add_usage(3, {"key_x": 7}, writer="w", number=3)
        assert await store.keys.usage(3) == {"key_x": 19}
        await store.close()


async def test_cancelled_callers_leave_no_replies_on_connections(empty_redis: RedisServer) -> None:
    """Callers are cancelled at any moment: the next caller reads its own answer."""
    store = RedisStore(empty_redis.url)
    names = [f"conv_{number}" for number in range(20)]
    for name in names:
        await store.create(Conversation(name, "me", 1.0, 1.0, title=name))
    draw = random.Random(7)
    num_cancelled = 0

    async def ask(name: str) -> None:
        assert (await store.get("me", name)).title == name

    for _ in range(60):
        tasks = [asyncio.create_task(ask(draw.choice(names))) for _ in range(30)]
        for _ in range(draw.randrange(6)):
            await asyncio.sleep(0)
        leaving = draw.sample(tasks, 15)
        num_cancelled += sum(task.cancel() for task in leaving)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError)
    assert num_cancelled > 500
    await store.close()


def test_connection_reset_during_a_write_counts_as_lost(empty_redis: RedisServer) -> None:
    """uvloop, which the server uses, reports it as a RuntimeError that redis-py does not convert."""

    async def write_behind_a_reset(client: Any) -> None:
        connection = await client.connection_pool.get_connection()
        try:
            connection._writer.transport.abort()
            await connection._writer.wait_closed()
            await connection.send_command("PING")
        finally:
            await client.connection_pool.release(connection)

    async def main() -> None:
        store = RedisStore(empty_redis.url)
        try:
            await store.create(HEAD)
            with pytest.raises(StoreUnavailableError):
                await store._connection.run(write_behind_a_reset)
            await until(lambda: answers(store), "an answer")
        finally:
            await store.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_redis_user_can_run_no_scripts_and_no_admin_commands(empty_redis: RedisServer) -> None:
    """All tests of the contract use this user; it has the documented permissions."""
    client = redis.Redis.from_url(empty_redis.url, protocol=2)
    for command in ("EVAL return 0", "CONFIG GET dir", "FLUSHALL", "KEYS *", "INFO", "SCRIPT FLUSH", "SHUTDOWN"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.get("elsewhere")
    client.close()


async def test_open_with_a_wrong_login_is_refused_with_the_reason(empty_redis: RedisServer) -> None:
    where = f"127.0.0.1:{empty_redis.port}"
    for url, reason in (
        (f"redis://chatcache:wrong@{where}/0", "rejects the login"),
        ("http://127.0.0.1", "not a URL"),
        ("redis://127.0.0.1:99999", "not a URL"),
    ):
        with pytest.raises(StoreUnusableError, match=reason) as refused:
            RedisStore(url)
        assert "wrong" not in refused.value.message and "secret" not in refused.value.message
    empty_redis.admin.execute_command("ACL", "SETUSER", "guest", "on", ">guest", "~other:*", "+@all")
    with pytest.raises(StoreUnusableError, match="cannot be used"):
        RedisStore(f"redis://guest:guest@{where}/0")


async def test_open_of_a_newer_layout_is_refused_without_changes(empty_redis: RedisServer) -> None:
    empty_redis.admin.set(redis_layout.SCHEMA_KEY, redis_layout.VERSION + 1)
    with pytest.raises(StoreUnusableError, match="newer"):
        RedisStore(empty_redis.url)
    assert empty_redis.admin.keys("*") == [redis_layout.SCHEMA_KEY.encode()]


async def test_conversation_uses_one_slot_and_delete_removes_all_its_keys(empty_redis: RedisServer) -> None:
    store = RedisStore(empty_redis.url)
    await store.create(Conversation("conv", "me}{", 1.0, 1.0, "Title"), [Item("a", None, "user", "Some words")])
    await store.append(
        "me}{",
        "conv",
        [Item("b", "a", "user", "More", response_id="r")],
        Turn("r", "b", "m", 1.0),
        claim=Claim("k", "d", "r"),
    )
    held = empty_redis.admin.keys("chatcache:{conv}:*")
    assert len(held) == 7 and len({key_slot(key) for key in held}) == 1
    await store.append("me}{", "conv", [], Turn("r", "b", "m", 1.0, status=COMPLETED))
    tree = await store.load("me}{", "conv")
    await store.delete_messages("me}{", "conv", plan_message_deletion(tree, "a"))
    await store.delete("me}{", "conv")
    await store.close()
    left = {key.decode() for key in empty_redis.admin.keys("*")}
    assert left == {"chatcache:schema", "chatcache:claim:{o=me%7D%7B}:k"}


async def test_large_merge_is_encoded_on_a_thread(empty_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts are folded and decoded on threads, so that streams are not delayed."""
    threads: set[str] = set()
    original = redis_layout.index_words

    def noted(texts: Any) -> str:
        threads.add(threading.current_thread().name)
        return original(texts)

    monkeypatch.setattr("chatcache.storage.redis.index_words", noted)
    store = RedisStore(empty_redis.url)
    long = [Item(f"msg_{number}", None, "user", "wörter " * 1000) for number in range(20)]
    await store.merge(HEAD, long, [])
    assert any(name.startswith("asyncio") for name in threads)
    assert list((await store.load("me", "conv")).items.values()) == long
    await store.close()


def test_redis_tests_use_the_shipped_acl(empty_redis: RedisServer) -> None:
    admin = empty_redis.admin
    admin.execute_command("ACL", "SETUSER", "copy", "on", *PERMISSIONS.split())
    ours, copy = (admin.acl_getuser(name) for name in ("chatcache", "copy"))
    admin.acl_deluser("copy")
    assert [ours[what] for what in ("commands", "keys", "channels")] == [
        copy[what] for what in ("commands", "keys", "channels")
    ]
    assert "off" in admin.acl_getuser("default")["flags"]


def test_docs_show_the_shipped_acl() -> None:
    readme = (DOCS / "deployment.md").read_text(encoding="utf-8")
    assert f"`ACL SETUSER chatcache on >PASSWORD {PERMISSIONS}`" in readme
