"""Sampling on the device: each seat's parameters, token counts, biases and mask, and the launches that draw.

Owns: all of that on the device, and the step's results there and in pinned memory. Runs in: the worker's
thread. Source: `workers/kernels/sampling.cu` draws; what a seat's parameters mean is `workers/sampling`'s,
whose `SeatTable` and `SeatMasks` are used as they are. Seats that ask for nothing special never touch
counts, biases or masks.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ds4.generation import NO_LOGPROBS
from workers.devices.cuda.backend import Argument, Backend, DeviceArray
from workers.devices.cuda.inputs import NUM_STAGES, Block
from workers.devices.interface import Limits, SeatParams, StepResult
from workers.kernels import catalogue
from workers.kernels.sampling_layout import ALWAYS, NEED_MASKED, NO_TOP_K, RESULT, SEAT
from workers.kernels.sources import Kernel
from workers.sampling import bias, penalties, typical
from workers.sampling.masks import SeatMasks
from workers.sampling.seats import ADJUSTS, SeatTable

_RESET_COUNTS: Final = Kernel(source="seats.cu", entry="reset_counts")
_COUNT_HISTORY: Final = Kernel(source="seats.cu", entry="count_history")
_SEAT_THREADS: Final = 256
_MAX_BLOCKS: Final = 256
_MAX_ADJUSTED: Final = 65_536 + 4096  # what the worker admits of biases and suppressed ids


def _capacity(vocab_size: int) -> int:
    """Biased and suppressed ids of one seat; whole multiples of 16 bytes."""
    return -(-min(2 * vocab_size, _MAX_ADJUSTED) // 4) * 4


def _mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def sampler_bytes(limits: Limits, vocab_size: int) -> int:
    """Device memory of a sampler."""
    seats = limits.max_seats + 1
    of_seat = SEAT.itemsize + 4 * (vocab_size + _mask_words(vocab_size) + 1) + 8 * _capacity(vocab_size)
    return (
        seats * of_seat
        + limits.max_seats * (RESULT.itemsize + 4 * vocab_size)
        + 4 * limits.max_context_tokens
    )


class DeviceSampler:
    """Draws one token for every sampled row. Owned by one device; `seat` and `launch` mutate it."""

    def __init__(self, backend: Backend, limits: Limits, vocab_size: int) -> None:
        self._backend = backend
        self.vocab_size: Final = vocab_size
        seats = limits.max_seats + 1
        self._table = SeatTable(seats)
        self._records = np.zeros(seats, SEAT)
        self._records["temperature"], self._records["top_p"] = 1.0, 1.0
        self._records["repetition"], self._records["top_k"] = 1.0, NO_TOP_K
        self._records["typical_p"] = 1.0
        self._records["num_logprobs"] = NO_LOGPROBS
        self._is_dirty = True
        self._capacity = _capacity(vocab_size)
        self._seats = backend.allocate(seats * SEAT.itemsize, np.uint8)
        self._counts = backend.allocate((seats, vocab_size), np.int32)
        self._adjust_ids = backend.allocate((seats, self._capacity), np.int32)
        self._adjust_values = backend.allocate((seats, self._capacity), np.float32)
        self._masks = backend.allocate((seats, _mask_words(vocab_size)), np.uint32)
        self._history = backend.allocate(limits.max_context_tokens, np.int32)
        self._adjusted = backend.allocate((limits.max_seats, vocab_size), np.float32)
        self._results = backend.allocate(limits.max_seats * RESULT.itemsize, np.uint8)
        self.last_tokens = backend.allocate(seats, np.int32)
        backend.fill(self.last_tokens, 0)
        self._stages: list[NDArray[np.uint8]] = [
            backend.pinned(limits.max_seats * RESULT.itemsize, np.uint8) for _ in range(NUM_STAGES)
        ]
        self.host_masks = SeatMasks(limits.max_seats, vocab_size)

    @staticmethod
    def kernels() -> list[Kernel]:
        """Everything that it launches."""
        return [
            catalogue.adjust(1).kernel,
            catalogue.typical(1).kernel,
            catalogue.sample(1).kernel,
            _RESET_COUNTS,
            _COUNT_HISTORY,
        ]

    # -- seats -------------------------------------------------------------------------------------

    def seat(self, seat: int, params: SeatParams) -> None:
        """Give `seat` to a sequence, forgetting the one before it."""
        sampling = params.sampling
        has_penalties = penalties.wanted(sampling)
        adjust_below = bias.Bias(params).adjust_below if bias.wanted(params) else 0
        if has_penalties or typical.wanted(sampling):
            adjust_below = ALWAYS
        table, record = self._table, self._records[seat]
        table.set(seat, sampling, adjust_below=adjust_below)
        self.host_masks.seat(seat, params.constraint)
        record["needs"] = int(table.needs[seat]) | (NEED_MASKED if params.constraint is not None else 0)
        record["temperature"], record["min_p"] = table.temperature[seat], table.min_p[seat]
        record["top_p"], record["stream"] = table.top_p[seat], table.stream[seat]
        record["top_k"] = min(int(table.top_k[seat]), NO_TOP_K)
        record["num_logprobs"] = table.num_logprobs[seat]
        record["adjust_below"] = min(adjust_below, ALWAYS)
        record["suppress_below"] = min(params.suppress_below, ALWAYS)
        record["repetition"] = sampling.repetition_penalty
        record["presence"], record["frequency"] = sampling.presence_penalty, sampling.frequency_penalty
        record["typical_p"] = sampling.typical_p
        record["num_biases"] = record["num_suppressed"] = 0
        if adjust_below > 0:
            self._bring_biases(seat, params)
        if has_penalties:
            self._bring_history(seat, params)
        self._is_dirty = True

    def _bring_biases(self, seat: int, params: SeatParams) -> None:
        ids, inverse = np.unique(
            np.array([token for token, _ in params.sampling.logit_bias], np.int32), return_inverse=True
        )
        suppressed = np.unique(np.array(params.suppressed_ids, np.int32))
        values = np.zeros(len(ids), np.float32)  # a repeated id adds up
        np.add.at(values, inverse, np.array([value for _, value in params.sampling.logit_bias], np.float32))
        record = self._records[seat]
        record["num_biases"], record["num_suppressed"] = len(ids), len(suppressed)
        row = 4 * self._capacity * seat
        everything = np.concatenate([ids, suppressed])
        if len(everything):
            self._backend.upload(everything, self._adjust_ids.part(row, self._capacity, np.int32))
        if len(values):
            self._backend.upload(values, self._adjust_values.part(row, self._capacity, np.float32))

    def _bring_history(self, seat: int, params: SeatParams) -> None:
        vocab, past = self.vocab_size, params.history.astype(np.int32)
        self._launch_for_seat(_RESET_COUNTS, vocab, (self._counts, seat, vocab))
        if len(past):
            self._backend.upload(past, self._history)
            num_prompt = min(params.num_prompt_tokens, len(past))
            arguments = (self._counts, seat, vocab, self._history, len(past), num_prompt)
            self._launch_for_seat(_COUNT_HISTORY, len(past), arguments)

    def _launch_for_seat(self, kernel: Kernel, count: int, arguments: tuple[Argument, ...]) -> None:
        blocks = min(_MAX_BLOCKS, -(-count // _SEAT_THREADS))
        self._backend.launch(kernel, (blocks, 1, 1), _SEAT_THREADS, 0, arguments)

    def upload_seats(self) -> None:
        """Queue the copy of what `seat` changed; before the step's launches, outside any graph."""
        if self._is_dirty:
            self._is_dirty = False
            self._backend.upload(self._records.view(np.uint8), self._seats)

    # -- masks -------------------------------------------------------------------------------------

    def constrained(self, seats: NDArray[np.int32]) -> list[int]:
        """Those of `seats` whose next token has to match a constraint."""
        wanted: list[int] = seats[(self._records["needs"][seats] & NEED_MASKED) != 0].tolist()
        return wanted

    def upload_masks(self, seats: list[int]) -> None:
        """Wait for the masks of these seats and queue their copies."""
        masks = self.host_masks.wait()
        low, high = min(seats), max(seats) + 1
        words = masks.shape[1]
        # A part starts at a multiple of 16 bytes: from a seat whose number is a multiple of four.
        low -= low % 4
        target = self._masks.part(4 * words * low, (high - low, words), np.uint32)
        self._backend.upload(masks[low:high], target)

    # -- steps -------------------------------------------------------------------------------------

    def adjusts(self, seats: NDArray[np.int32]) -> bool:
        """Whether logits of one of these seats may have to be changed before the draw."""
        return bool((self._table.needs[seats] & ADJUSTS).any())

    def reports(self, seats: NDArray[np.int32]) -> bool:
        """Whether one of these seats asks for log-probabilities."""
        return bool((self._table.num_logprobs[seats] != NO_LOGPROBS).any())

    def launch(self, block: Block, logits: DeviceArray, *, adjusts: bool) -> None:
        """Queue the draw. logits: [samples, vocab_size] float32. `adjusts`: also where a seat is constrained."""
        vocab, rows = self.vocab_size, (block.positions, block.sample_rows, block.sample_seats)
        if adjusts:
            self._launch(
                catalogue.adjust(block.num_samples),
                *(self._adjusted, logits, self._seats, self._counts, self._adjust_ids, self._adjust_values),
                *(self._masks, *rows, vocab, self._capacity),
            )
            self._launch(catalogue.typical(block.num_samples), self._adjusted, self._seats, *rows, vocab)
        self._launch(
            catalogue.sample(block.num_samples),
            *(self._results, self.last_tokens, self._counts, logits, self._adjusted, self._seats),
            *(*rows, vocab),
        )

    def _launch(self, shape: catalogue.Shape, *arguments: Argument) -> None:
        self._backend.launch(shape.kernel, shape.grid, shape.block, shape.shared_bytes, arguments)

    def download(self, stage: int, count: int) -> None:
        """Queue the copy of the results of `count` samples to the pinned memory of `stage`."""
        self._backend.download(self._results, self._stages[stage][: count * RESULT.itemsize])

    def read(self, stage: int, count: int, result: StepResult, *, reports: bool) -> None:
        """Fill `result` from the pinned memory of `stage`, whose copy is done."""
        result.num_samples = count
        found = self._stages[stage][: count * RESULT.itemsize].view(RESULT)
        result.token_ids[:count] = found["token"]
        result.ok[:count] = found["ok"] != 0
        if reports:
            result.logprobs[:count] = found["logprob"]
            result.top_ids[:count] = found["top_ids"]
            result.top_logprobs[:count] = found["top_logprobs"]
