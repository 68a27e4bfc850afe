"""When a step is captured, when its graph runs, and what happens where capturing fails."""

import logging

import numpy as np
import pytest

from workers.devices.cuda.graphs import Graphs, make_buckets
from workers.devices.emulator.backend import EmulatorBackend, EmulatorGraph


class Calls(EmulatorBackend):
    """The emulator, with what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def begin_capture(self) -> None:
        self.log.append("begin")
        super().begin_capture()

    def end_capture(self) -> EmulatorGraph:
        self.log.append("end")
        return super().end_capture()

    def replay(self, graph: object) -> None:
        self.log.append("replay")
        super().replay(graph)


@pytest.mark.parametrize(
    ("seats", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
        (300, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 300)),
    ],
)
def test_buckets_end_with_the_most_seats(seats: int, expected: tuple[int, ...]) -> None:
    assert make_buckets(seats) == expected


def test_the_first_step_of_a_size_runs_eagerly_and_later_ones_by_graph() -> None:
    backend = Calls()
    graphs = Graphs(backend)

    def launch() -> None:
        backend.log.append("launch")

    for key in (4, 4, 8, 4):
        graphs.run(key, launch)
    captured = ["launch", "begin", "launch", "end"]
    assert backend.log == [*captured, "replay", *captured, "replay"]
    assert graphs.num_graphs == 2


def test_a_capture_that_fails_leaves_steps_eager_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    backend = Calls()
    graphs = Graphs(backend)

    def launch() -> None:
        backend.log.append("launch")
        backend.allocate(1, np.uint8)  # what a graph does not allow

    with caplog.at_level(logging.WARNING):
        for key in (4, 4, 8):
            graphs.run(key, launch)
    assert backend.log == ["launch", "begin", "launch", "end", "launch", "launch"]
    (record,) = caplog.records
    assert "cannot be captured" in record.getMessage()
    backend.synchronise()  # the capture was closed and the device works


def test_a_defect_in_the_launches_is_no_capture_failure() -> None:
    backend = Calls()
    graphs = Graphs(backend)
    counts = []

    def launch() -> None:
        counts.append(0)
        if len(counts) == 2:
            raise TypeError("a wrong argument")

    with pytest.raises(TypeError, match="wrong argument"):
        graphs.run(1, launch)
    backend.synchronise()
