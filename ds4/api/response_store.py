"""Stored responses, shared by all front ends of a server.

Owns: the SQLite file in the shared directory, which outlives the server. Runs in: front ends, in a thread of its own, opened with
the first use. Source: SQLite's documentation of its rollback journal and of locks between processes.

Every front end writes: SQLite's own locks, which end with their process, keep them apart, and a journal
that a killed process left is rolled back by the next one. A response is its owner's, the tenant of the API
key, and is not there for anybody else. Bounds: whoever keeps most gives what is longest unused of it; a
response counts as used whenever a conversation goes on from it or from one after it.
"""

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from ds4.config import Settings
from ds4.errors import Ds4Error

FILE_NAME: Final = "responses.sqlite"
_BUSY_S: Final = 10.0  # a turn of another process takes milliseconds
_MAX_TURNS: Final = 10_000
_OVERHEAD_BYTES: Final = 512  # of a row, its index entries, half-filled pages
_VERSION: Final = 2  # of the schema; what another version kept is given up
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    previous TEXT,
    used_ms INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    response BLOB NOT NULL,
    input BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON responses (owner, used_ms, num_bytes);
"""
_T = TypeVar("_T")


class StoreError(Ds4Error):
    """The store cannot be used, or does not take what it is given."""


class Stored(msgspec.Struct, frozen=True):
    """One stored response: JSON as it was answered, and the JSON list of its own input items."""

    response: bytes
    input: bytes
    previous: str | None


class ResponseStore:
    """One front end's way to the store. Owned by its event loop; the connection by its thread."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self.max_bytes = settings.response_store_mib * 1024 * 1024
        self._max_age_ms = settings.response_store_hours * 3_600_000
        self._path = directory / FILE_NAME
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything is stored at all."""
        return self.max_bytes > 0

    async def put(self, response_id: str, stored: Stored, *, owner: str = "") -> None:
        """Keep a response. Raises StoreError."""
        await self._run(lambda connection: self._put(connection, response_id, stored, owner))

    async def get(self, response_id: str, *, owner: str = "") -> Stored | None:
        """A response; None where it is not, or no longer, there. Raises StoreError."""
        return await self._run(lambda connection: self._get(connection, response_id, owner))

    async def delete(self, response_id: str, *, owner: str = "") -> bool:
        """Forget a response; returns whether it was there. Raises StoreError."""
        return await self._run(lambda connection: self._delete(connection, response_id, owner))

    async def conversation(self, response_id: str, *, owner: str = "") -> list[Stored] | None:
        """All turns up to and with this one, oldest first; None where one is missing. Raises StoreError."""
        return await self._run(lambda connection: self._conversation(connection, response_id, owner))

    async def close(self) -> None:
        """Close the file, if it is open."""
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
            self._thread.shutdown(wait=False)
            self._thread = None

    async def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        if not self.is_on:
            raise StoreError("this server stores no responses (--response-store-mib is 0)")
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ds4-store")
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self._work(work))

    def _work(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            if self._connection is None:
                self._connection = _open(self._path)
            return work(self._connection)
        except (sqlite3.Error, OSError) as error:
            self._close()  # a later call may find the file whole again
            raise StoreError(f"the response store cannot be used: {error}") from error

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _put(self, connection: sqlite3.Connection, response_id: str, stored: Stored, owner: str) -> None:
        num_bytes = len(stored.response) + len(stored.input) + _OVERHEAD_BYTES
        if num_bytes > self.max_bytes:
            raise StoreError("the response is larger than the whole store")
        now_ms = _now_ms()
        with _writing(connection):
            connection.execute("DELETE FROM responses WHERE used_ms < ?", (now_ms - self._max_age_ms,))
            kept: dict[str, int] = dict(
                connection.execute("SELECT owner, sum(num_bytes) FROM responses GROUP BY owner")
            )
            while sum(kept.values()) + num_bytes > self.max_bytes:
                most = max(kept, key=lambda each: kept[each] + (num_bytes if each == owner else 0))
                oldest, size = connection.execute(
                    "SELECT id, num_bytes FROM responses WHERE owner = ? ORDER BY used_ms, num_bytes LIMIT 1",
                    (most,),
                ).fetchone()
                connection.execute("DELETE FROM responses WHERE id = ?", (oldest,))
                kept[most] -= size
                if not kept[most]:
                    del kept[most]
            connection.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                (response_id, owner, stored.previous, now_ms, num_bytes, stored.response, stored.input),
            )

    def _get(self, connection: sqlite3.Connection, response_id: str, owner: str) -> Stored | None:
        row = connection.execute(
            "SELECT response, input, previous FROM responses WHERE id = ? AND owner = ? AND used_ms >= ?",
            (response_id, owner, _now_ms() - self._max_age_ms),
        ).fetchone()
        return None if row is None else Stored(*row)

    def _delete(self, connection: sqlite3.Connection, response_id: str, owner: str) -> bool:
        with _writing(connection):
            cursor = connection.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
            )
            return cursor.rowcount > 0

    def _conversation(
        self, connection: sqlite3.Connection, response_id: str, owner: str
    ) -> list[Stored] | None:
        turns: dict[str, Stored] = {}
        at: str | None = response_id
        with _writing(connection):
            while at is not None:
                stored = self._get(connection, at, owner)
                if stored is None or at in turns or len(turns) >= _MAX_TURNS:
                    return None
                turns[at] = stored
                at = stored.previous
            now_ms = _now_ms()
            connection.executemany(
                "UPDATE responses SET used_ms = ? WHERE id = ?", [(now_ms, turn) for turn in turns]
            )
        return list(reversed(turns.values()))


def _open(path: Path) -> sqlite3.Connection:
    # SQLite itself would let others read the file, and gives its journal the same mode.
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        with _writing(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != _VERSION:
                connection.execute("DROP TABLE IF EXISTS responses")
                connection.execute(f"PRAGMA user_version = {_VERSION}")
            for statement in filter(str.strip, _SCHEMA.split(";")):
                connection.execute(statement)
            # What an earlier boot of this machine kept counts as used now: its clock was another.
            connection.execute("UPDATE responses SET used_ms = :now WHERE used_ms > :now", {"now": _now_ms()})
    except sqlite3.Error:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _writing(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that has the write lock from its start: two that read first would block each other."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _now_ms() -> int:
    """Of the clock that does not jump. It begins anew with the machine; then ages are too low, never too high."""
    return time.monotonic_ns() // 1_000_000
