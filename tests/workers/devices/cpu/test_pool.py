"""Threads: how many there are, how they wake, how they end."""

import ctypes
import os
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba", reason="the CPU engine needs numba")

from tests.support.server import wait_until
from tests.workers.devices.cpu.rig import cpu_driver, tiny_program
from workers.devices.cpu.control import MAIL_SLEEPING, MAILBOX_BYTES
from workers.devices.cpu.pool import physical_cores


def write_topology(root: Path, cores: dict[int, str]) -> Path:
    for cpu, core in cores.items():
        place = root / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "physical_package_id").write_text("0\n")
        (place / "core_id").write_text(core)
    return root


def allow(monkeypatch: pytest.MonkeyPatch, cpus: set[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus, raising=False)


def test_hardware_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, {0, 1, 2, 3})
    topology = write_topology(tmp_path, {0: "0", 1: "1", 2: "0", 3: "1"})
    assert physical_cores(topology, tmp_path / "none") == 2


def test_cores_that_the_process_may_not_use_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, {1})
    assert physical_cores(write_topology(tmp_path, {0: "0", 1: "1"}), tmp_path / "none") == 1


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max 100000", 4), ("150000 100000", 2), ("10000 100000", 1), ("rubbish", 4)],
)
def test_a_containers_limit_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int
) -> None:
    allow(monkeypatch, {0, 1, 2, 3})
    (tmp_path / "cpu.max").write_text(limit + "\n")
    assert physical_cores(tmp_path / "none", tmp_path / "cpu.max") == expected


def test_helpers_that_went_to_sleep_take_part_again(tmp_path: Path) -> None:
    with cpu_driver(tiny_program(tmp_path, "Q4_1"), threads=3) as (device, driver):
        mails = device._pool._mail_address
        for _ in range(5):
            driver.seat(0)
            driver.step({0: [5, 6, 7, 8]})
            results = np.array(device.logits())
            wait_until(lambda: all(sleeping(mails, thread) for thread in (1, 2)), "both helpers to sleep")
            driver.seat(0)
            driver.step({0: [5, 6, 7, 8]})
            assert np.array_equal(device.logits(), results)


def sleeping(mails: int, thread: int) -> bool:
    return ctypes.c_int64.from_address(mails + thread * MAILBOX_BYTES + MAIL_SLEEPING).value == 1


def test_closing_ends_the_helpers(tmp_path: Path) -> None:
    with cpu_driver(tiny_program(tmp_path, "Q4_1"), threads=3) as (device, driver):
        helpers = [thread for thread in threading.enumerate() if thread.name.startswith("ds4-cpu-")]
        assert len(helpers) == 2
        driver.seat(0)
        driver.step({0: [5]})
        device.close()
        assert not any(helper.is_alive() for helper in helpers)
