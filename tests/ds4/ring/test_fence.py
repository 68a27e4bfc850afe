"""Which fence is chosen, that each kind works here, and that none is no option.

What a fence orders cannot be observed from Python on x86-64; the shapes of the protocol were checked
with a memory-model checker for arm64 (ARCHITECTURE.md).
"""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ds4.errors import RingError
from ds4.ring import fence
from ds4.ring.fence import Fence, choose_fence


@pytest.mark.parametrize("make", fence.MAKERS)
def test_every_kind_works_or_says_why_not(make: Callable[[], Fence]) -> None:
    try:
        made = make()
    except OSError as refusal:
        pytest.skip(f"not on this machine: {refusal}")
    for _ in range(1000):
        made.call()


def test_the_code_page_is_executable_and_not_writable() -> None:
    made = fence.code_page_fence()
    address = ctypes.cast(made.call, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line)
        assert found is not None
        if int(found[1], 16) <= address < int(found[2], 16):
            assert found[3] == "r-xp"
            return
    pytest.fail("the code page is not mapped")


def refuse() -> Fence:
    raise OSError("not here")


def break_down() -> Fence:
    def call() -> None:
        raise OSError("refused when called")

    return Fence("broken", call)


def test_the_first_that_survives_its_test_is_chosen() -> None:
    calls: list[int] = []

    def work() -> Fence:
        return Fence("works", lambda: calls.append(1))

    assert choose_fence((refuse, break_down, work, refuse)).name == "works"
    assert calls


def test_without_any_fence_the_ring_refuses_and_names_the_cure() -> None:
    with pytest.raises(RingError, match=r"libatomic1.*not here.*refused when called"):
        choose_fence((refuse, break_down))


def test_a_library_function_without_a_barrier_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "string_at", lambda _address, _size: bytes(64))
    with pytest.raises(OSError, match="no barrier"):
        fence.libatomic_fence()


def test_a_process_has_one_fence() -> None:
    assert fence.process_fence() is fence.process_fence()
