"""ds4/api/response_store.py: what is kept, for how long, and who sees it."""

import asyncio
import contextlib
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ds4.api.response_store import FILE_NAME, ResponseStore, Stored, StoreError
from ds4.config import Settings
from tests.support.front_rig import run

_MIB = 1024 * 1024


def _settings(response_store_mib: int = 1, response_store_hours: int = 720) -> Settings:
    return Settings(response_store_mib=response_store_mib, response_store_hours=response_store_hours)


def _with_store(
    tmp_path: Path, scenario: Callable[[ResponseStore], Awaitable[None]], **settings: int
) -> None:
    async def whole() -> None:
        store = ResponseStore(_settings(**settings), tmp_path)
        try:
            await scenario(store)
        finally:
            await store.close()

    run(whole)


def _stored(text: bytes = b"{}", previous: str | None = None) -> Stored:
    return Stored(text, b"[]", previous)


def test_nothing_is_opened_before_the_first_use(tmp_path: Path) -> None:
    async def scenario(store: ResponseStore) -> None:
        assert not (tmp_path / FILE_NAME).exists()
        assert await store.get("a") is None
        assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600

    _with_store(tmp_path, scenario)


def test_what_an_earlier_boot_of_the_machine_kept_ages_from_now_on(tmp_path: Path) -> None:
    async def write(store: ResponseStore) -> None:
        await store.put("a", _stored(b"1"))

    async def read(store: ResponseStore) -> None:
        assert await store.get("a") == _stored(b"1")

    _with_store(tmp_path, write)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        (before,) = connection.execute("SELECT used_ms FROM responses").fetchone()
        connection.execute("UPDATE responses SET used_ms = used_ms + 1000000000")
        connection.commit()
        _with_store(tmp_path, read)
        (after,) = connection.execute("SELECT used_ms FROM responses").fetchone()
    assert before <= after < before + 1000000000


def test_what_one_front_end_keeps_another_finds_also_after_the_first_is_gone(tmp_path: Path) -> None:
    async def write(store: ResponseStore) -> None:
        await store.put("a", _stored(b"1"))

    async def read(store: ResponseStore) -> None:
        assert await store.get("a") == _stored(b"1")
        assert await store.delete("a")
        assert not await store.delete("a")
        assert await store.get("a") is None

    _with_store(tmp_path, write)
    _with_store(tmp_path, read)


def test_a_conversation_is_all_its_turns_in_order(tmp_path: Path) -> None:
    async def scenario(store: ResponseStore) -> None:
        await store.put("a", _stored(b"1"))
        await store.put("b", _stored(b"2", "a"))
        await store.put("c", _stored(b"3", "b"))
        turns = await store.conversation("c")
        assert turns is not None
        assert [turn.response for turn in turns] == [b"1", b"2", b"3"]
        await store.delete("a")
        assert await store.conversation("c") is None
        assert await store.conversation("nothing") is None

    _with_store(tmp_path, scenario)


def test_what_is_one_owners_is_nobody_elses(tmp_path: Path) -> None:
    async def scenario(store: ResponseStore) -> None:
        await store.put("a", _stored(b"1"), owner="alice")
        await store.put("b", _stored(b"2", "a"), owner="bob")
        for owner in ("", "bob"):
            assert await store.get("a", owner=owner) is None
            assert await store.conversation("a", owner=owner) is None
            assert await store.conversation("b", owner=owner) is None
            assert not await store.delete("a", owner=owner)
        assert await store.get("a", owner="alice") == _stored(b"1")
        assert await store.delete("a", owner="alice")

    _with_store(tmp_path, scenario)


def test_whoever_keeps_most_makes_room(tmp_path: Path) -> None:
    async def scenario(store: ResponseStore) -> None:
        await store.put("little", _stored(b"1"), owner="modest")
        for index in range(12):
            await store.put(f"big{index}", _stored(b"x" * 200_000), owner="greedy")
        assert await store.get("little", owner="modest") is not None
        assert await store.get("big0", owner="greedy") is None
        await store.put("middle", _stored(b"x" * 300_000), owner="modest")
        assert await store.get("middle", owner="modest") is not None
        assert await store.get("little", owner="modest") is not None

    _with_store(tmp_path, scenario)


def test_what_an_older_version_kept_is_given_up(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as old:
        old.execute("CREATE TABLE responses (id TEXT PRIMARY KEY)")

    async def scenario(store: ResponseStore) -> None:
        await store.put("a", _stored(b"1"), owner="alice")
        assert await store.get("a", owner="alice") is not None

    _with_store(tmp_path, scenario)


def test_a_turn_that_follows_itself_ends_nothing_but_its_conversation(tmp_path: Path) -> None:
    async def scenario(store: ResponseStore) -> None:
        await store.put("a", _stored(previous="b"))
        await store.put("b", _stored(previous="a"))
        assert await store.conversation("a") is None

    _with_store(tmp_path, scenario)


def test_what_is_longest_unused_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1_000_000, 2_000_000))
    monkeypatch.setattr("ds4.api.response_store._now_ms", lambda: next(clock))

    async def scenario(store: ResponseStore) -> None:
        size = _MIB // 4
        for name in ("a", "b", "c"):
            await store.put(name, _stored(b"x" * size))
        assert await store.conversation("a") is not None  # used again
        await store.put("d", _stored(b"x" * size))
        assert await store.get("b") is None
        for name in ("a", "c", "d"):
            assert await store.get(name) is not None

    _with_store(tmp_path, scenario)


def test_the_file_stays_within_its_bound(tmp_path: Path) -> None:
    async def scenario(store: ResponseStore) -> None:
        for index in range(200):
            await store.put(f"r{index}", _stored(b"x" * 30_000))
        assert (tmp_path / FILE_NAME).stat().st_size < 1.3 * _MIB
        assert await store.get("r199") is not None
        assert await store.get("r0") is None

    _with_store(tmp_path, scenario)


def test_what_is_larger_than_the_store_is_refused(tmp_path: Path) -> None:
    async def scenario(store: ResponseStore) -> None:
        await store.put("a", _stored())
        with pytest.raises(StoreError, match="larger"):
            await store.put("b", _stored(b"x" * (_MIB + 1)))
        assert await store.get("a") is not None

    _with_store(tmp_path, scenario)


def test_the_old_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10_000_000]
    monkeypatch.setattr("ds4.api.response_store._now_ms", lambda: now[0])

    async def scenario(store: ResponseStore) -> None:
        await store.put("a", _stored())
        now[0] += 3_600_000
        assert await store.get("a") is not None
        now[0] += 1
        assert await store.get("a") is None

    _with_store(tmp_path, scenario, response_store_hours=1)


def test_a_store_that_is_off_says_so(tmp_path: Path) -> None:
    async def scenario(store: ResponseStore) -> None:
        assert not store.is_on
        with pytest.raises(StoreError, match="response-store-mib"):
            await store.get("a")
        assert not (tmp_path / FILE_NAME).exists()

    _with_store(tmp_path, scenario, response_store_mib=0)


def test_a_broken_file_is_an_error_that_goes_away_with_it(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database at all" * 100)

    async def scenario(store: ResponseStore) -> None:
        with pytest.raises(StoreError, match="cannot be used"):
            await store.get("a")
        (tmp_path / FILE_NAME).unlink()
        await store.put("a", _stored())
        assert await store.get("a") is not None

    _with_store(tmp_path, scenario)


def test_many_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    async def whole() -> None:
        stores = [ResponseStore(Settings(), tmp_path) for _ in range(4)]
        try:
            await asyncio.gather(
                *(store.put(f"{at}-{n}", _stored()) for at, store in enumerate(stores) for n in range(10))
            )
            for at, store in enumerate(stores):
                for n in range(10):
                    assert await store.get(f"{(at + 1) % 4}-{n}") is not None
        finally:
            for store in stores:
                await store.close()

    run(whole)


_KILLED = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
for n in range(100):
    connection.execute("UPDATE responses SET response = ?", (os.urandom(20000),))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_killed_in_its_transaction_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    async def scenario(store: ResponseStore) -> None:
        await store.put("a", _stored(b"1"))
        await store.close()
        killed = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _KILLED, str(tmp_path / FILE_NAME)
        )
        await killed.wait()
        assert (tmp_path / f"{FILE_NAME}-journal").exists()
        assert await store.get("a") == _stored(b"1")
        await store.put("b", _stored())

    _with_store(tmp_path, scenario)
