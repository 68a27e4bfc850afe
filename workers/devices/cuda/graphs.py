"""Decode steps as captured graphs, one for each size of batch.

Owns: the graphs. Runs in: the worker's thread, inside `submit`. Source: gpu.md's measurement that launching
some three hundred kernels from Python takes longer than they run; a graph is one call.

A batch is padded to the next bucket. The first step of a size runs eagerly, so that every kernel is loaded and the
step has its results, and is captured right after for the steps to come. `CudaDevice.warm_up` makes that first step
one of nobody's at load; where it was not called, the first stream of a size waits for the capture.
"""

import logging
from collections.abc import Callable, Hashable
from typing import Final

from workers.devices.cuda.backend import Backend, Graph
from workers.devices.interface import DeviceFaultError

log = logging.getLogger(__name__)

_SMALL_BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_STEP: Final = 64  # between larger ones


def make_buckets(max_seats: int) -> tuple[int, ...]:
    """Sizes that decode batches are padded to, ascending; the last is `max_seats`."""
    sizes = [*_SMALL_BUCKETS, *range(_SMALL_BUCKETS[-1] + _STEP, max_seats, _STEP)]
    return (*(size for size in sizes if size < max_seats), max_seats)


class Graphs:
    """Runs a step's launches by graph where it can. Owned by one device."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._graphs: dict[Hashable, Graph] = {}
        self._is_broken = False

    @property
    def num_graphs(self) -> int:
        """How many were captured."""
        return len(self._graphs)

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Queue what `launch` launches: the same for every call with this key, but for what memory holds."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._backend.replay(graph)
            return
        launch()
        if not self._is_broken:
            self._capture(key, launch)

    def _capture(self, key: Hashable, launch: Callable[[], None]) -> None:
        """A device that is really broken shows in the next call that waits; here only the graph is lost."""
        try:
            self._backend.begin_capture()
            try:
                launch()
            finally:
                graph = self._backend.end_capture()
        except (DeviceFaultError, MemoryError) as error:
            self._is_broken = True
            log.warning("decode steps cannot be captured in graphs (%s): they run slower", error)
            return
        self._graphs[key] = graph
        log.debug("captured", extra={"key": str(key), "launches": graph.num_launches})

    def clear(self) -> None:
        """Drop them."""
        self._graphs.clear()
