"""Counters, gauges and histograms of all processes in one shared file, and their text exposition.

Owns: the file `metrics` in the shared directory. Runs in: worker and front ends.
Source: the Prometheus text exposition format 0.0.4; meanings follow vLLM's metrics of similar name,
so that dashboards and autoscalers port over.

Layout: one page of header (magic, layout checksum), then one block of 64-bit words per process: the
worker's, then one per front-end place. A block has one writer, its process; whoever answers
`/metrics` adds the blocks up, so every front end reports the same totals. The words outlive their
writer: a restarted process goes on counting where its predecessor stopped, its gauges start at 0.
A word is an aligned u64 or float64, written by one instruction and therefore never seen torn; a
histogram may be seen between two of its words, which costs a scrape one sample of precision.
"""

import contextlib
import mmap
import os
import secrets
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, Self

import msgspec

from ds4.errors import RingError

FILE_NAME: Final = "metrics"
WORKER: Final = -1  # `owner` of the worker's block; front end i owns block i
MAX_FRONT_ENDS: Final = 254  # as many as the lease file has places
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_MAGIC: Final = b"DS4METR1"
_HEADER_BYTES: Final = 4096
_WORD_BYTES: Final = 8

_SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)
_STEP_SECONDS: Final = (0.0005, *_SECONDS[:-4])
_POWERS_OF_TWO: Final = tuple(float(1 << power) for power in range(13))
_TOKENS: Final = tuple(float(1 << power) for power in range(0, 21, 2))


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the metric table. `owner` says who writes it; a label has a closed set of values."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    owner: Literal["worker", "front", "scrape"]
    buckets: tuple[float, ...] = ()
    label: str = ""
    label_values: tuple[str, ...] = ("",)

    @property
    def num_words(self) -> int:
        """Words of one block: each histogram has its buckets, the rest, and the sum."""
        per_series = len(self.buckets) + 2 if self.kind == "histogram" else 1
        return per_series * len(self.label_values)


TABLE: Final[tuple[Metric, ...]] = (
    Metric(
        name="ds4_num_requests_running",
        kind="gauge",
        owner="worker",
        help="Requests that have a seat in the running batch.",
    ),
    Metric(
        name="ds4_num_requests_waiting",
        kind="gauge",
        owner="worker",
        help="Requests the worker took and has not started, or has preempted.",
    ),
    Metric(
        name="ds4_decode_pending",
        kind="gauge",
        owner="scrape",
        help="Slots that wait for evaluation: submitted and not yet admitted.",
    ),
    Metric(name="ds4_slots_used", kind="gauge", owner="scrape", help="Ring slots in use."),
    Metric(name="ds4_slots", kind="gauge", owner="scrape", help="Ring slots that exist."),
    Metric(name="ds4_worker_ready", kind="gauge", owner="scrape", help="1 while a worker serves."),
    Metric(name="ds4_kv_pages", kind="gauge", owner="worker", help="KV pages that exist."),
    Metric(name="ds4_kv_pages_used", kind="gauge", owner="worker", help="KV pages held by sequences."),
    Metric(
        name="ds4_kv_pages_cached",
        kind="gauge",
        owner="worker",
        help="KV pages kept only as prefix cache; they can be taken at any time.",
    ),
    Metric(
        name="ds4_kv_cache_usage_perc",
        kind="gauge",
        owner="worker",
        help="Share of the KV pages held by sequences, 0 to 1.",
    ),
    Metric(
        name="ds4_prefix_cache_queries_total",
        kind="counter",
        owner="worker",
        help="Prompt tokens looked up in the prefix cache.",
    ),
    Metric(
        name="ds4_prefix_cache_hits_total",
        kind="counter",
        owner="worker",
        help="Prompt tokens found in the prefix cache.",
    ),
    Metric(
        name="ds4_prefill_tokens_total",
        kind="counter",
        owner="worker",
        help="Prompt tokens computed, after the prefix cache.",
    ),
    Metric(
        name="ds4_prompt_tokens_total",
        kind="counter",
        owner="front",
        help="Prompt tokens of accepted requests.",
    ),
    Metric(
        name="ds4_generation_tokens_total",
        kind="counter",
        owner="front",
        help="Tokens generated for clients.",
    ),
    Metric(
        name="ds4_batch_size",
        kind="histogram",
        owner="worker",
        buckets=_POWERS_OF_TWO,
        help="Sequences in a decode batch.",
    ),
    Metric(
        name="ds4_iteration_tokens_total",
        kind="histogram",
        owner="worker",
        buckets=(1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0),
        help="Rows of a step: decode rows and prompt tokens.",
    ),
    Metric(
        name="ds4_step_time_seconds",
        kind="histogram",
        owner="worker",
        buckets=_STEP_SECONDS,
        help="Time of one step.",
    ),
    Metric(
        name="ds4_step_errors_total",
        kind="counter",
        owner="worker",
        help="Steps that ended in a device fault.",
    ),
    Metric(
        name="ds4_num_preemptions_total",
        kind="counter",
        owner="worker",
        help="Sequences set back because KV pages ran out.",
    ),
    Metric(
        name="ds4_worker_restarts_total",
        kind="counter",
        owner="worker",
        help="Workers that followed an earlier one on this shared directory.",
    ),
    Metric(
        name="ds4_request_queue_time_seconds",
        kind="histogram",
        owner="worker",
        buckets=_SECONDS,
        help="Time from submission to the first step of a request.",
    ),
    Metric(
        name="ds4_request_prefill_time_seconds",
        kind="histogram",
        owner="worker",
        buckets=_SECONDS,
        help="Time from the first step of a request to its first token.",
    ),
    Metric(
        name="ds4_request_decode_time_seconds",
        kind="histogram",
        owner="worker",
        buckets=_SECONDS,
        help="Time from the first token of a request to its last.",
    ),
    Metric(
        name="ds4_time_to_first_token_seconds",
        kind="histogram",
        owner="front",
        buckets=_SECONDS,
        help="Time from the arrival of a request to its first token.",
    ),
    Metric(
        name="ds4_inter_token_latency_seconds",
        kind="histogram",
        owner="front",
        buckets=_STEP_SECONDS,
        help="Time between two tokens of a request.",
    ),
    Metric(
        name="ds4_e2e_request_latency_seconds",
        kind="histogram",
        owner="front",
        buckets=_SECONDS,
        help="Time from the arrival of a request to its end.",
    ),
    Metric(
        name="ds4_request_prompt_tokens",
        kind="histogram",
        owner="front",
        buckets=_TOKENS,
        help="Prompt tokens of a request.",
    ),
    Metric(
        name="ds4_request_generation_tokens",
        kind="histogram",
        owner="front",
        buckets=_TOKENS,
        help="Generated tokens of a request.",
    ),
    Metric(
        name="ds4_request_success_total",
        kind="counter",
        owner="front",
        label="finished_reason",
        label_values=("stop", "length", "tool_calls"),
        help="Sequences that ended normally.",
    ),
    Metric(
        name="ds4_request_errors_total",
        kind="counter",
        owner="front",
        help="Sequences that ended in an error of ours.",
    ),
    Metric(
        name="ds4_requests_rejected_total",
        kind="counter",
        owner="front",
        label="reason",
        label_values=(
            "full",
            "unavailable",
            "draining",
            "invalid",
            "context",
            "too_large",
            "unauthorized",
            "key_limit",
        ),
        help="Requests refused before they reached the worker.",
    ),
    Metric(
        name="ds4_requests_cancelled_total",
        kind="counter",
        owner="front",
        help="Sequences whose client went away.",
    ),
    Metric(
        name="ds4_resumed_streams_total",
        kind="counter",
        owner="front",
        help="Sequences continued on a new worker after theirs was lost.",
    ),
    Metric(
        name="ds4_requests_quarantined_total",
        kind="counter",
        owner="front",
        help="Sequences given up because the worker crashed on them alone.",
    ),
    Metric(
        name="ds4_http_responses_total",
        kind="counter",
        owner="front",
        label="code",
        label_values=("2xx", "3xx", "4xx", "5xx"),
        help="HTTP responses by status class.",
    ),
)


class _Place(msgspec.Struct, frozen=True):
    """Where a series lies in a block."""

    word: int
    buckets: tuple[float, ...]
    is_float: bool


def _places() -> tuple[dict[tuple[str, str], _Place], int]:
    places: dict[tuple[str, str], _Place] = {}
    word = 0
    for metric in TABLE:
        step = metric.num_words // len(metric.label_values)
        for value in metric.label_values:
            places[metric.name, value] = _Place(word, metric.buckets, metric.kind == "gauge")
            word += step
    padded = -(-(word + 1) // 16) * 16  # a block starts on its own pair of cache lines
    return places, padded


_PLACES, _BLOCK_WORDS = _places()
_STARTS_WORD: Final = _BLOCK_WORDS - 1  # how often this block was opened by a writer
_FILE_BYTES: Final = _HEADER_BYTES + (1 + MAX_FRONT_ENDS) * _BLOCK_WORDS * _WORD_BYTES
_LAYOUT: Final = _MAGIC + zlib.crc32(
    repr([(metric.name, metric.kind, metric.buckets, metric.label_values) for metric in TABLE]).encode()
).to_bytes(8, "little")


class Metrics:
    """One process's block, and the sums over all of them. Owned by that process; one thread writes."""

    def __init__(self, view: mmap.mmap, owner: int) -> None:
        self._view = view
        raw = memoryview(view)[_HEADER_BYTES:]
        self._all_counts = raw.cast("Q")
        self._all_numbers = raw.cast("d")
        start = (owner + 1) * _BLOCK_WORDS
        self._counts = self._all_counts[start : start + _BLOCK_WORDS]
        self._numbers = self._all_numbers[start : start + _BLOCK_WORDS]

    @classmethod
    def open(cls, directory: Path, *, owner: int) -> Self:
        """Map the file, made if missing, for `owner`: WORKER or a front-end index.

        Raises RingError where the directory has no room or cannot be written.
        """
        if not WORKER <= owner < MAX_FRONT_ENDS:
            raise RingError(f"no metrics block for front end {owner}")
        try:
            metrics = cls(_map(directory / FILE_NAME), owner)
        except OSError as error:
            raise RingError(f"cannot open the metrics file in {directory}: {error.strerror}") from error
        metrics._start(owner)
        return metrics

    def _start(self, owner: int) -> None:
        for metric in TABLE:
            if metric.kind == "gauge":
                for value in metric.label_values:
                    self._numbers[_PLACES[metric.name, value].word] = 0.0
        if owner == WORKER and self._counts[_STARTS_WORD] > 0:
            self.add("ds4_worker_restarts_total")
        self._counts[_STARTS_WORD] += 1

    def add(self, name: str, value: int = 1, label: str = "") -> None:
        """Raise a counter."""
        self._counts[_PLACES[name, label].word] += value

    def set(self, name: str, value: float, label: str = "") -> None:
        """Set this process's share of a gauge."""
        self._numbers[_PLACES[name, label].word] = value

    def observe(self, name: str, value: float, count: int = 1) -> None:
        """Put `count` equal samples into a histogram."""
        place = _PLACES[name, ""]
        self._counts[place.word + bisect_left(place.buckets, value)] += count
        self._numbers[place.word + len(place.buckets) + 1] += value * count

    def value(self, name: str, label: str = "") -> float:
        """A counter or gauge, summed over all processes."""
        place = _PLACES[name, label]
        words = self._all_numbers if place.is_float else self._all_counts
        return sum(words[place.word :: _BLOCK_WORDS].tolist())

    def samples(self, name: str) -> tuple[int, float]:
        """How many samples a histogram has over all processes, and their sum."""
        buckets, total = self._histogram(_PLACES[name, ""])
        return sum(buckets), total

    def exposition(self, scraped: Mapping[str, float] | None = None) -> str:
        """All metrics as text. `scraped` gives the gauges that are read rather than kept."""
        return "".join(line + "\n" for line in self._lines(scraped or {}))

    def close(self) -> None:
        """Unmap. The file stays: it belongs to the shared directory."""
        for view in (self._counts, self._numbers, self._all_counts, self._all_numbers):
            view.release()
        with contextlib.suppress(BufferError):
            self._view.close()

    def _histogram(self, place: _Place) -> tuple[list[int], float]:
        counts = [
            sum(self._all_counts[place.word + index :: _BLOCK_WORDS].tolist())
            for index in range(len(place.buckets) + 1)
        ]
        sum_word = place.word + len(place.buckets) + 1
        return counts, sum(self._all_numbers[sum_word::_BLOCK_WORDS].tolist())

    def _lines(self, scraped: Mapping[str, float]) -> Iterator[str]:
        for metric in TABLE:
            yield f"# HELP {metric.name} {metric.help}"
            yield f"# TYPE {metric.name} {metric.kind}"
            if metric.kind == "histogram":
                yield from self._histogram_lines(metric)
                continue
            for label_value in metric.label_values:
                labels = f'{{{metric.label}="{label_value}"}}' if metric.label else ""
                if metric.owner == "scrape":
                    value = scraped.get(metric.name, 0.0)
                else:
                    value = self.value(metric.name, label_value)
                yield f"{metric.name}{labels} {_number(value)}"

    def _histogram_lines(self, metric: Metric) -> Iterator[str]:
        counts, total = self._histogram(_PLACES[metric.name, ""])
        running = 0
        for bound, count in zip([*metric.buckets, float("inf")], counts, strict=True):
            running += count
            edge = "+Inf" if bound == float("inf") else _number(bound)
            yield f'{metric.name}_bucket{{le="{edge}"}} {running}'
        yield f"{metric.name}_sum {_number(total)}"
        yield f"{metric.name}_count {running}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(float(value))


def _map(path: Path) -> mmap.mmap:
    for _ in range(8):  # two processes that both find an old layout may replace each other's file once
        with contextlib.suppress(FileNotFoundError):
            view = _map_existing(path)
            if view is not None:
                return view
            path.unlink(missing_ok=True)  # made by another version: its writers keep their own inode
        _create(path)
    raise OSError(0, "another process keeps replacing it")


def _map_existing(path: Path) -> mmap.mmap | None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != _FILE_BYTES:
            return None
        view = mmap.mmap(descriptor, _FILE_BYTES)
        if view[: len(_LAYOUT)] != _LAYOUT:
            view.close()
            return None
        return view
    finally:
        os.close(descriptor)


def _create(path: Path) -> None:
    """Put a complete file in place, unless another process was first."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _FILE_BYTES)  # ENOSPC now instead of SIGBUS later
        os.pwrite(descriptor, _LAYOUT, 0)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)
