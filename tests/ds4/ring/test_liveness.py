"""Leases fall with their holder, however it ends, and nobody else's action drops them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from ds4.ring.liveness import LEASE_NAME, Leases

HOLD = """
import sys, time
from pathlib import Path
from ds4.ring.liveness import Leases
leases = Leases(Path(sys.argv[1]))
print(leases.take(int(sys.argv[2])), flush=True)
time.sleep(600)
"""


def holder(directory: Path, byte: int) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), str(byte)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "True\n"
    return child


def test_a_killed_process_loses_its_place_and_a_stopped_one_keeps_it(tmp_path: Path) -> None:
    child = holder(tmp_path, 3)
    leases = Leases(tmp_path)
    assert leases.is_held_by_other(3)
    assert not leases.take(3)
    assert leases.take(4)
    child.send_signal(signal.SIGSTOP)
    assert leases.is_held_by_other(3)
    child.kill()
    child.communicate()
    assert not leases.is_held_by_other(3)
    assert leases.take(3)
    leases.abandon()


def test_places_are_separate_within_one_process_too(tmp_path: Path) -> None:
    one, other = Leases(tmp_path), Leases(tmp_path)
    assert one.take(0)
    assert not one.is_held_by_other(0)
    assert other.is_held_by_other(0)
    assert not other.take(0)
    one.drop(0)
    assert other.take(0)
    one.abandon()
    one.abandon()
    other.abandon()


FORK = """
import os, sys
from pathlib import Path
from ds4.ring.liveness import Leases
leases = Leases(Path(sys.argv[1]))
assert leases.take(1)
if os.fork():
    os._exit(0)
print("child lives", flush=True)
sys.stdin.read()
"""


def test_a_forked_child_does_not_keep_its_parents_lease_alive(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", FORK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "child lives\n"
    assert parent.wait(120) == 0
    watcher = Leases(tmp_path)
    assert not watcher.is_held_by_other(1)
    watcher.abandon()
    parent.communicate()  # its input ends, and so does the child


def test_all_places_can_be_taken_only_by_the_last_one(tmp_path: Path) -> None:
    one, other = Leases(tmp_path), Leases(tmp_path)
    assert one.take(5)
    assert other.take(900)
    assert not one.take_all()
    other.abandon()
    assert one.take_all()
    one.remove()
    assert not (tmp_path / LEASE_NAME).exists()
    one.abandon()
    assert not one.take_all()


def test_who_arrives_while_the_last_one_leaves_ends_on_the_new_file(tmp_path: Path) -> None:
    leaving, arriving = Leases(tmp_path), Leases(tmp_path)  # the newcomer has opened the old file
    assert leaving.take_all()
    leaving.remove()
    leaving.abandon()
    assert arriving.take(1)
    third = Leases(tmp_path)
    assert third.is_held_by_other(1)
    third.abandon()
    arriving.abandon()


def test_asking_does_not_make_a_file(tmp_path: Path) -> None:
    try:
        Leases(tmp_path, create=False)
    except FileNotFoundError:
        assert os.listdir(tmp_path) == []
    else:
        raise AssertionError("a lease file appeared from nowhere")
