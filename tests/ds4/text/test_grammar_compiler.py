"""Grammars for the worker: limits, the cache, and a checking process that comes and goes."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from ds4.errors import RequestError
from ds4.generation import MAX_GRAMMAR_BYTES
from ds4.text import grammar_compiler
from ds4.text.grammar import JSON_OBJECT, GrammarSource, choice_source, json_source
from ds4.text.grammar_compiler import GrammarCompiler
from tests.ds4.text.test_grammar_check import BOMB
from tests.support import schemas
from tests.support.front_rig import DEADLINE_S
from tests.support.tiny_model import write_tiny_model

Scenario = Callable[[GrammarCompiler], Awaitable[None]]
GOOD = choice_source(["a", "b"])


def run(tmp_path: Path, scenario: Scenario) -> None:
    async def bounded() -> None:
        compiler = GrammarCompiler(write_tiny_model(tmp_path / "tiny.gguf"))
        async with asyncio.timeout(DEADLINE_S):
            try:
                await scenario(compiler)
            finally:
                await compiler.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


def pid_of(compiler: GrammarCompiler) -> int:
    assert compiler._child is not None
    return compiler._child.pid


async def refused(compiler: GrammarCompiler, source: GrammarSource) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await compiler.compile(source, "response_format")
    assert caught.value.param == "response_format"
    assert str(caught.value).startswith("response_format ")
    return caught.value


def test_a_source_becomes_the_workers_grammar(tmp_path: Path) -> None:
    async def scenario(compiler: GrammarCompiler) -> None:
        grammar = await compiler.compile(json_source(schemas.PERSON), "response_format")
        assert grammar == schemas.grammar(schemas.PERSON)

    run(tmp_path, scenario)


def test_the_most_frequent_request_needs_no_process(tmp_path: Path) -> None:
    async def scenario(compiler: GrammarCompiler) -> None:
        assert await compiler.compile(JSON_OBJECT, "response_format")
        assert compiler._child is None

    run(tmp_path, scenario)


def test_what_was_compiled_or_refused_once_is_remembered(tmp_path: Path) -> None:
    async def scenario(compiler: GrammarCompiler) -> None:
        bad = json_source({"not": {}})
        first = await compiler.compile(GOOD, "guided_choice")
        error = await refused(compiler, bad)
        assert error.code == "unsupported_parameter"
        await compiler.close()  # no process is there to be asked
        assert await compiler.compile(GOOD, "guided_choice") == first
        assert str(await refused(compiler, bad)) == str(error)
        assert compiler._child is None

    run(tmp_path, scenario)


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "_MAX_CACHED", 40)
    monkeypatch.setattr(grammar_compiler, "_MAX_CACHED_CHARS", 1 << 20)

    async def scenario(compiler: GrammarCompiler) -> None:
        for number in range(50):
            await compiler.compile(choice_source([f"{number}"]), "guided_choice")
        assert len(compiler._cache) == 40
        large = "y" * 30_000
        for number in range(30):
            await compiler.compile(choice_source([f"{number}{large}"]), "guided_choice")
        assert 0.9 * (1 << 20) < compiler._num_chars <= 1 << 20

    run(tmp_path, scenario)


def test_a_bomb_is_refused_and_the_next_grammar_is_compiled(tmp_path: Path) -> None:
    async def scenario(compiler: GrammarCompiler) -> None:
        await compiler.compile(GOOD, "x")
        before = pid_of(compiler)
        ticks = 0

        async def others() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        task = asyncio.ensure_future(others())
        error = await refused(compiler, BOMB)
        task.cancel()
        assert error.code == "grammar_too_complex"
        assert ticks > 10  # the loop went on meanwhile
        assert await compiler.compile(choice_source(["c"]), "x")
        assert pid_of(compiler) != before
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)

    run(tmp_path, scenario)


def test_the_same_source_from_many_is_checked_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(compiler: GrammarCompiler) -> None:
        await asyncio.gather(*(refused(compiler, BOMB) for _ in range(4)))
        assert len(caplog.records) == 1

    run(tmp_path, scenario)


def test_a_source_over_the_limit_is_refused_before_anybody_looks_at_it(tmp_path: Path) -> None:
    async def scenario(compiler: GrammarCompiler) -> None:
        error = await refused(compiler, GrammarSource("regex", "a" * (MAX_GRAMMAR_BYTES + 1)))
        assert error.code == "grammar_too_large"
        assert compiler._child is None

    run(tmp_path, scenario)


def test_a_client_that_leaves_does_not_spoil_the_next_answer(tmp_path: Path) -> None:
    async def scenario(compiler: GrammarCompiler) -> None:
        await compiler.compile(GOOD, "x")
        for delay_s in (0.0, 0.001, 0.05):
            task = asyncio.ensure_future(compiler.compile(BOMB, "x"))
            await asyncio.sleep(delay_s)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            fresh = choice_source([f"after {delay_s}"])
            assert f"after {delay_s}" in await compiler.compile(fresh, "x")

    run(tmp_path, scenario)


def test_many_at_once_get_their_own_answers(tmp_path: Path) -> None:
    async def scenario(compiler: GrammarCompiler) -> None:
        words = [f"word{number % 20}" for number in range(60)]
        grammars = await asyncio.gather(*(compiler.compile(choice_source([word]), "x") for word in words))
        assert all(f'"{word}"' in grammar for word, grammar in zip(words, grammars, strict=True))

    run(tmp_path, scenario)


def test_a_process_that_others_kill_costs_nobody_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        grammar_compiler, "_LEAVE_S", 0.0
    )  # the patience with a live one is not that with a dead one

    async def scenario(compiler: GrammarCompiler) -> None:
        await compiler.compile(GOOD, "x")
        os.kill(pid_of(compiler), signal.SIGSTOP)
        task = asyncio.ensure_future(compiler.compile(choice_source(["z"]), "x"))
        await asyncio.sleep(0)
        os.kill(pid_of(compiler), signal.SIGKILL)
        assert '"z"' in await task

    run(tmp_path, scenario)


def test_a_foreign_folder_called_ds4_is_not_run_in_place_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = tmp_path / "here"
    (foreign / "ds4").mkdir(parents=True)
    (foreign / "ds4" / "__init__.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(foreign)

    async def scenario(compiler: GrammarCompiler) -> None:
        assert '"z"' in await compiler.compile(choice_source(["z"]), "x")

    run(tmp_path, scenario)


def test_a_process_that_others_kill_as_it_starts_costs_nobody_an_answer(tmp_path: Path) -> None:
    async def scenario(compiler: GrammarCompiler) -> None:
        task = asyncio.ensure_future(compiler.compile(choice_source(["z"]), "x"))
        while compiler._child is None:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)
        os.kill(pid_of(compiler), signal.SIGKILL)
        assert '"z"' in await task

    run(tmp_path, scenario)


def test_a_process_that_was_killed_is_replaced(tmp_path: Path) -> None:
    async def scenario(compiler: GrammarCompiler) -> None:
        await compiler.compile(GOOD, "x")
        assert compiler._child is not None
        child = compiler._child
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
        assert await compiler.compile(choice_source(["z"]), "x")

    run(tmp_path, scenario)
