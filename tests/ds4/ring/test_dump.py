"""`ds4-server ring`: a human sees the ring, and looking changes nothing."""

import asyncio
import os
from pathlib import Path

import pytest

from ds4.errors import RingError
from ds4.ring.dump import dump
from ds4.ring.states import SlotState
from tests.ds4.ring.harness import array, kill, make_front_end, make_worker, prompt


def test_it_shows_worker_front_ends_and_busy_slots(tmp_path: Path) -> None:
    async def run() -> None:
        directory = tmp_path / "ring"
        worker = make_worker(directory)
        front_end = await make_front_end(directory, worker)
        lost = await make_front_end(directory, worker)
        stream = front_end.submit(b"", prompt(7))
        worker.poll()
        worker.set_status(array(stream.slot), 7, 5, 3, SlotState.DECODE)
        worker.set_num_running(1)
        kill(lost)
        before = (directory / "ring").read_bytes()
        text = dump(directory)
        assert (directory / "ring").read_bytes() == before
        assert "READY" in text
        assert "1 running" in text
        assert "pending    1" in text
        rows = [line.split() for line in text.splitlines()]
        assert ["0", "attached", "1", "0", "0", "0", "0"] in rows
        assert any(row[:2] == ["1", "dead"] for row in rows)
        assert ["0", "0", "DECODE", "7", "5", "3", "512"] in rows
        kill(worker)
        assert "DEAD" in dump(directory)
        await front_end.close()

    asyncio.run(run())


def test_without_a_ring_it_says_so_and_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="is the worker running"):
        dump(tmp_path)
    with pytest.raises(RingError, match="is the worker running"):
        dump(tmp_path / "missing")
    assert os.listdir(tmp_path) == []


def test_an_empty_ring_is_shown_as_empty(tmp_path: Path) -> None:
    worker = make_worker(tmp_path / "ring")
    text = dump(tmp_path / "ring")
    assert "none" in text
    assert "0 of 12 in use" in text
    worker.close()
