"""Sampling on the device: each seat's parameters, token history and bias, and the launches that draw.

Owns: `SeatSampling` records, histories and biases on the device, the step's results there and in pinned
memory. Runs in: the worker's thread. Source: `workers/kernels/sampling.cu` draws; what a seat's parameters mean is
`workers/sampling`'s, whose `SeatTable` is used as it is.

A history is one word for each seat and token, a bias one float: sparse lists would be smaller, but then a
vocabulary-wide logit_bias would need its own limit. Seats that ask for neither never touch them.
"""

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.generation import MAX_TOP_LOGPROBS, NO_LOGPROBS
from workers.devices.cuda.backend import Backend, DeviceArray
from workers.devices.cuda.inputs import NUM_STAGES, Block
from workers.devices.interface import Limits, SeatParams, StepResult
from workers.kernels.sources import Kernel
from workers.sampling import bias, penalties
from workers.sampling.seats import ALWAYS, SeatTable

# `struct SeatSampling` of sampling.cu.
SEAT_RECORD: Final = np.dtype(
    [
        ("flags", np.uint32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("min_p", np.float32),
        ("top_p", np.float64),
        ("stream", np.uint64),
        ("num_top", np.int32),
        ("adjust_below", np.int32),
        ("suppress_below", np.int32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
    ],
    align=True,
)
_COUNTS: Final = 8  # beside the bits of SeatTable.needs
_LARGEST: Final = int(np.iinfo(np.int32).max)
_ROW_BEST: Final = Kernel(source="sampling.cu", entry="row_best")
_SAMPLE: Final = Kernel(source="sampling.cu", entry="sample")
_SET_ADJUSTMENTS: Final = Kernel(source="seats.cu", entry="set_adjustments")
_BEST_THREADS: Final = 256
_SAMPLE_THREADS: Final = 512
_SPLIT_TOKENS: Final = 4096
_MAX_SPLITS: Final = 32
_MAX_BLOCKS: Final = 64


def _padded(count: int) -> int:
    return -(-count // 4) * 4


def sampler_bytes(limits: Limits, vocab_size: int) -> int:
    """Device memory of a sampler."""
    seats, vocab = limits.max_seats + 1, _padded(vocab_size)
    results = 4 * _padded(limits.max_seats) * (3 + 2 * MAX_TOP_LOGPROBS)
    scratch = 4 * (limits.max_context_tokens + 3 * vocab) + 12 * _MAX_SPLITS * limits.max_seats
    return seats * (SEAT_RECORD.itemsize + 8 * vocab) + results + scratch


class _Parts(msgspec.Struct, frozen=True):
    """The result block on the device, by what it holds."""

    token_ids: DeviceArray
    ok: DeviceArray
    logprobs: DeviceArray
    top_ids: DeviceArray
    top_logprobs: DeviceArray


class DeviceSampler:
    """Draws one token for every sampled row. Owned by one device; `seat` and `launch` mutate it."""

    def __init__(self, backend: Backend, limits: Limits, vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        seats, self._pitch = limits.max_seats + 1, _padded(vocab_size)
        self._table = SeatTable(seats)
        self._records = np.zeros(seats, SEAT_RECORD)
        self._records["temperature"], self._records["top_p"] = 1.0, 1.0
        self._records["repetition"], self._records["top_k"] = 1.0, _LARGEST
        self._is_dirty = True
        self._seats = backend.allocate(SEAT_RECORD.itemsize * seats, np.uint8)
        self._history = backend.allocate((seats, self._pitch), np.uint32)
        self._bias = backend.allocate((seats, self._pitch), np.float32)
        self._ids = backend.allocate(limits.max_context_tokens + 2 * self._pitch, np.int32)
        self._values = backend.allocate(self._pitch, np.float32)
        self._splits = min(_MAX_SPLITS, -(-vocab_size // _SPLIT_TOKENS))
        self._best = backend.allocate(limits.max_seats * self._splits, np.uint64)
        self._lowest = backend.allocate(limits.max_seats * self._splits, np.float32)
        self.last_tokens = backend.allocate(seats, np.int32)
        backend.fill(self.last_tokens, 0)
        # token_ids, ok, logprobs [samples]; top_ids, top_logprobs [samples, MAX_TOP_LOGPROBS]
        self._samples = samples = _padded(limits.max_seats)
        words = samples * (3 + 2 * MAX_TOP_LOGPROBS)
        self._block = block = backend.allocate(words, np.int32)
        tops = (samples, MAX_TOP_LOGPROBS)
        self._parts = _Parts(
            block.part(0, samples, np.int32),
            block.part(4 * samples, samples, np.int32),
            block.part(8 * samples, samples, np.float32),
            block.part(12 * samples, tops, np.int32),
            block.part(4 * samples * (3 + MAX_TOP_LOGPROBS), tops, np.float32),
        )
        self._stages: list[NDArray[np.int32]] = [backend.pinned(words, np.int32) for _ in range(NUM_STAGES)]

    @staticmethod
    def kernels() -> list[Kernel]:
        """Everything that `seat` and `launch` launch."""
        return [_ROW_BEST, _SAMPLE, _SET_ADJUSTMENTS]

    def seat(self, seat: int, params: SeatParams) -> None:
        """Give `seat` to a sequence, forgetting the one before it."""
        sampling = params.sampling
        has_bias, has_penalties = bias.wanted(params), penalties.wanted(sampling)
        adjust_below = 0
        if has_bias:
            adjust_below = bias.Bias(params).adjust_below
        if has_penalties:
            adjust_below = ALWAYS
        table, record = self._table, self._records[seat]
        table.set(seat, sampling, adjust_below=adjust_below)
        record["flags"] = int(table.needs[seat]) | (_COUNTS if has_penalties else 0)
        record["temperature"], record["min_p"] = table.temperature[seat], table.min_p[seat]
        record["top_p"], record["stream"] = table.top_p[seat], table.stream[seat]
        record["top_k"] = min(int(table.top_k[seat]), _LARGEST)
        record["num_top"] = min(int(table.num_logprobs[seat]), self._vocab_size)
        record["adjust_below"] = min(adjust_below, _LARGEST)
        record["suppress_below"] = min(params.suppress_below, _LARGEST)
        record["repetition"] = sampling.repetition_penalty
        record["presence"], record["frequency"] = sampling.presence_penalty, sampling.frequency_penalty
        self._is_dirty = True
        if adjust_below > 0:
            self._set_adjustments(seat, params, has_penalties=has_penalties)

    def _set_adjustments(self, seat: int, params: SeatParams, *, has_penalties: bool) -> None:
        row = 4 * self._pitch * seat
        history = self._history.part(row, self._pitch, np.uint32)
        biases = self._bias.part(row, self._pitch, np.float32)
        self._backend.fill(history, 0)
        self._backend.fill(biases, 0)
        past = params.history if has_penalties else params.history[:0]
        ids, inverse = np.unique(
            np.array([token for token, _ in params.sampling.logit_bias], np.int32), return_inverse=True
        )
        values = np.zeros(len(ids), np.float32)  # a repeated id adds up
        np.add.at(values, inverse, np.array([value for _, value in params.sampling.logit_bias], np.float32))
        suppressed = np.unique(np.array(params.suppressed_ids, np.int32))
        everything = np.concatenate([past.astype(np.int32), ids, suppressed])
        if not len(everything):
            return
        self._backend.upload(everything, self._ids)
        if len(values):
            self._backend.upload(values, self._values)
        blocks = min(_MAX_BLOCKS, -(-len(everything) // 256))
        num_prompt = min(params.num_prompt_tokens, len(past))
        self._backend.launch(
            _SET_ADJUSTMENTS,
            (blocks, 1, 1),
            256,
            0,
            (
                *(history, biases, self._ids, self._values),
                *(len(past), num_prompt, len(ids), len(suppressed)),
            ),
        )

    def upload_seats(self) -> None:
        """Queue the copy of what `seat` changed; before the step's launches, outside any graph."""
        if self._is_dirty:
            self._is_dirty = False
            self._backend.upload(self._records.view(np.uint8), self._seats)

    def launch(self, block: Block, logits: DeviceArray, logits_pitch: int) -> None:
        """Queue the draw. logits [samples, logits_pitch] float32, of which the vocabulary's columns count."""
        samples, parts = block.num_samples, self._parts
        self._backend.launch(
            _ROW_BEST,
            (self._splits, samples, 1),
            _BEST_THREADS,
            0,
            (self._best, self._lowest, logits, self._vocab_size, logits_pitch),
        )
        self._backend.launch(
            _SAMPLE,
            (samples, 1, 1),
            _SAMPLE_THREADS,
            0,
            (
                *(parts.token_ids, parts.ok, parts.logprobs, parts.top_ids, parts.top_logprobs),
                *(self.last_tokens, self._history, self._bias, logits, self._best, self._lowest),
                *(block.sample_rows, block.sample_seats, block.positions, self._seats),
                *(self._vocab_size, logits_pitch, self._pitch, self._splits),
            ),
        )

    def download(self, stage: int, seats: NDArray[np.int32]) -> NDArray[np.int64]:
        """Queue the copy of what the samples of `seats` brought to the pinned memory of `stage`.

        Returns what `read` must be given: how many log-probabilities each row asked for, since its seat
        may belong to another sequence by then.
        """
        asked = self._table.num_logprobs[seats]
        wants_tops = len(seats) and asked.max() > 0
        host = self._stages[stage]
        self._backend.download(self._block, host if wants_tops else host[: 3 * self._samples])
        return asked

    def read(self, stage: int, asked: NDArray[np.int64], result: StepResult) -> None:
        """Fill `result` from the pinned memory of `stage`, whose copy is done."""
        count, samples, host = len(asked), self._samples, self._stages[stage]
        result.num_samples = count
        result.token_ids[:count] = host[:count]
        result.ok[:count] = host[samples : samples + count] != 0
        if not (asked != NO_LOGPROBS).any():
            return
        result.logprobs[:count] = host[2 * samples : 2 * samples + count].view(np.float32)
        tops = host[3 * samples :].reshape(2, samples, MAX_TOP_LOGPROBS)
        for row in np.flatnonzero(asked > 0).tolist():
            wanted = min(int(asked[row]), self._vocab_size)
            result.top_ids[row, :wanted] = tops[0, row, :wanted]
            result.top_logprobs[row, :wanted] = tops[1, row, :wanted].view(np.float32)
