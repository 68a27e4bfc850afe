"""Sources of clients become grammars that the worker can take at once, under limits and with a cache.

Owns: `GrammarCompiler` and its checking process. Runs in: front ends, on their event loop; what may
take long happens in the child (ds4/text/grammar_check.py). The child is started by the first source
that needs it and replaced when one was too much for it.
"""

import asyncio
import contextlib
import logging
import signal
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Final

import msgspec

from ds4.children import module_command
from ds4.errors import RequestError, RingFullError
from ds4.generation import MAX_GRAMMAR_BYTES
from ds4.text.grammar import JSON_OBJECT, MAX_CHECK_S, GrammarSource, Verdict, grammar_of

_log = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("<I")
_START_S: Final = 60.0  # reading a large vocabulary on a busy machine
_PATIENCE_S: Final = 20.0  # in the queue for the child, before a client is told to come back
_LEAVE_S: Final = 0.2  # for an idle one to notice that its input is closed
# For one that closed its output to be gone: why it ended decides what becomes of its work.
_REAP_S: Final = 10.0
# Ended by somebody else, not by what it was given: worth another attempt.
_BY_OTHERS: Final = (-signal.SIGKILL, -signal.SIGTERM)
_STARTS: Final = 3
_MAX_CACHED: Final = 512
_MAX_CACHED_CHARS: Final = 16 << 20
_TOO_MUCH: Final = Verdict(
    problem="takes too much time or memory to compile; make it simpler", code="grammar_too_complex"
)
_verdicts: Final = msgspec.msgpack.Decoder(Verdict)


class _ChildLostError(Exception):
    """The checking process ended in the middle of a check."""


class GrammarCompiler:
    """One per front end, used by its event loop only."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._child: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._cache: OrderedDict[GrammarSource, Verdict] = OrderedDict()
        self._cache[JSON_OBJECT] = Verdict(grammar=grammar_of(JSON_OBJECT))  # ours, and the most frequent
        self._num_chars = 0

    async def compile(self, source: GrammarSource, param: str) -> str:
        """The grammar for the worker.

        Raises RequestError naming `param`, RingFullError while other grammars keep the process busy.
        """
        verdict = self._cached(source)
        if verdict is None:
            if len(source.text.encode()) > MAX_GRAMMAR_BYTES:
                raise RequestError(
                    f"{param} is larger than {MAX_GRAMMAR_BYTES} bytes", param=param, code="grammar_too_large"
                )
            verdict = await self._check(source)
        if verdict.problem:
            raise RequestError(f"{param} {verdict.problem}", param=param, code=verdict.code)
        return verdict.grammar

    async def close(self) -> None:
        """End the child."""
        await self._end_child()

    def _cached(self, source: GrammarSource) -> Verdict | None:
        found = self._cache.get(source)
        if found is not None:
            self._cache.move_to_end(source)
        return found

    def _keep(self, source: GrammarSource, verdict: Verdict) -> None:
        self._cache[source] = verdict
        self._num_chars += len(source.text) + len(verdict.grammar)
        while len(self._cache) > _MAX_CACHED or self._num_chars > _MAX_CACHED_CHARS:
            oldest, kept = self._cache.popitem(last=False)
            self._num_chars -= len(oldest.text) + len(kept.grammar)

    async def _check(self, source: GrammarSource) -> Verdict:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._lock.acquire()
        except TimeoutError:
            raise RingFullError("too many grammars are being compiled") from None
        try:
            verdict = self._cached(source)  # somebody before us in the queue may have had the same
            if verdict is None:
                verdict = await self._ask(source)
                self._keep(source, verdict)
            return verdict
        finally:
            self._lock.release()

    async def _ask(self, source: GrammarSource) -> Verdict:
        raw = msgspec.msgpack.encode(source)
        for _ in range(2):
            child = await self._started()
            assert child.stdin is not None
            try:
                child.stdin.write(_LENGTH.pack(len(raw)) + raw)
                await child.stdin.drain()
                return await self._answer(child, 2 * MAX_CHECK_S)  # its own alarm comes before
            except (_ChildLostError, ConnectionError):
                if await self._end_child(_REAP_S) not in _BY_OTHERS:
                    break
            except TimeoutError:
                await self._end_child()
                break
            except asyncio.CancelledError:
                await self._end_child()  # its answer would be taken for the next one's
                raise
        _log.warning("a grammar took too much time or memory and was refused")
        return _TOO_MUCH

    async def _started(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        for _ in range(_STARTS):
            self._child = child = await asyncio.create_subprocess_exec(
                *module_command("ds4.text.grammar_check"),
                str(self._model_path),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                ready = await self._answer(child, _START_S)
                break
            except _ChildLostError as error:
                if await self._end_child(_REAP_S) not in _BY_OTHERS:
                    raise RuntimeError("the grammar process did not start") from error
            except TimeoutError as error:
                await self._end_child()
                raise RuntimeError("the grammar process did not start in time") from error
            except asyncio.CancelledError:
                await self._end_child()
                raise
        else:
            raise RuntimeError("the grammar process was killed each time it started")
        if ready.problem:
            await self._end_child()
            raise RequestError(
                f"this model has no structured output: {ready.problem}", code="unsupported_model"
            )
        return child

    async def _answer(self, child: asyncio.subprocess.Process, limit_s: float) -> Verdict:
        assert child.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                (length,) = _LENGTH.unpack(await child.stdout.readexactly(_LENGTH.size))
                return _verdicts.decode(await child.stdout.readexactly(length))
        except asyncio.IncompleteReadError as error:
            raise _ChildLostError from error

    async def _end_child(self, patience_s: float = _LEAVE_S) -> int:
        """Its exit status; 0 where it still ran, or there was none."""
        child, self._child = self._child, None
        if child is None:
            return 0
        if child.stdin is not None:
            child.stdin.close()
        try:
            async with asyncio.timeout(patience_s):
                return await child.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
            return 0
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            raise
