"""The CUDA device on the emulator: against the reference, and the promises of the device seam."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ds4.errors import ConfigError
from ds4.generation import SamplingParams
from tests.support.device_driver import small_limits
from tests.support.tiny_model import TinyShape
from tests.workers.devices.cuda.rig import PROMPT, Pair, distance, needs_compiler, pair, tiny_program
from workers.devices.cuda.device import CudaDevice, memory_needs
from workers.devices.emulator.backend import EmulatorBackend
from workers.devices.interface import PREVIOUS_SAMPLE, SeatParams, StepBatch, StepResult
from workers.model.program import Embed, Program
from workers.sampling.sampler import HostSampler

pytestmark = needs_compiler

# Int8 activations: about 0.5 % a product, which random layers amplify; a wrong weight would give 1.
# Floats differ by float16 keys and values, and by products with 10-bit mantissas in prompts.
INT8, FLOAT = 0.12, 0.01


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return tiny_program(tmp_path_factory.mktemp("tiny"), "Q8_0")


@pytest.fixture(scope="module")
def float_program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return tiny_program(tmp_path_factory.mktemp("tiny"), "F32")


@pytest.mark.parametrize(
    ("quant", "limit"),
    [(q, INT8) for q in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]
    + [(q, FLOAT) for q in ("F16", "BF16", "F32")],
)
def test_logits_are_the_references_for_every_weight_type(tmp_path: Path, quant: str, limit: float) -> None:
    with pair(tiny_program(tmp_path, quant)) as both:
        assert distance(*both.logits({0: PROMPT, 1: PROMPT[:3]})) < limit  # by prompt chunks
        for token in (7, 8, 9):  # eagerly, then by graph
            assert distance(*both.logits({0: [token], 1: [token + 1]})) < limit
        assert both.cuda.num_graphs == 1


@pytest.mark.parametrize(
    "shape",
    [
        TinyShape(tied_head=True),
        TinyShape(biases=True),
        TinyShape(hidden_size=96, ffn_size=160),
        TinyShape(num_heads=4, num_kv_heads=1, head_size=64, num_layers=1),
        TinyShape(num_heads=32, num_kv_heads=1, head_size=16, num_layers=1),
    ],
    ids=["tied head", "biases", "odd sizes", "one key-value head", "a group too large for decode attention"],
)
def test_other_shapes_agree_too(tmp_path: Path, shape: TinyShape) -> None:
    with pair(tiny_program(tmp_path, "Q8_0", shape)) as both:
        assert distance(*both.logits({0: PROMPT, 1: PROMPT[:2]})) < INT8
        for _ in range(2):
            assert distance(*both.logits({0: [4], 1: [5]})) < INT8


def test_weights_without_a_kernel_are_widened(tmp_path: Path) -> None:
    shape = TinyShape(hidden_size=256, num_heads=4, head_size=64, ffn_size=256, num_layers=1)
    with pair(tiny_program(tmp_path, "TQ2_0", shape)) as both:
        assert distance(*both.logits({0: PROMPT})) < FLOAT


def mixed_types(path: Path) -> Program:
    """Keys of another type than queries and values, up of another than gate."""
    first, second = tiny_program(path, "Q8_0"), tiny_program(path, "Q4_1")
    operations = []
    for ours, theirs in zip(first.operations, second.operations, strict=True):
        changes: dict[str, Any] = {
            name: getattr(theirs, name) for name in ("k", "up") if name in ours.__struct_fields__
        }
        operations.append(msgspec.structs.replace(ours, **changes))
    return msgspec.structs.replace(first, operations=tuple(operations))


def test_parts_of_one_product_may_have_different_types(tmp_path: Path) -> None:
    with pair(mixed_types(tmp_path)) as both:
        assert distance(*both.logits({0: PROMPT})) < INT8


def test_long_contexts_agree_across_splits_of_attention(tmp_path: Path) -> None:
    limits = small_limits(max_seats=2, max_context_tokens=400, max_rows=128)
    program = tiny_program(tmp_path, "F32", TinyShape(num_layers=1))
    tokens = [int(token) for token in np.random.default_rng(0).integers(3, 259, 300)]
    with pair(program, limits=limits) as both:
        for first in range(0, 300, 100):
            assert distance(*both.logits({0: tokens[first : first + 100]})) < FLOAT
        assert distance(*both.logits({0: [9]})) < FLOAT


def test_greedy_tokens_are_the_references(float_program: Program) -> None:
    with pair(float_program) as both:
        prompts = [PROMPT, PROMPT[3:9], [40], PROMPT[:17]]
        assert both.driver.generate(prompts, 12) == both.oracle.generate(prompts, 12)


def test_steps_of_decode_rows_and_prompt_chunks_agree(float_program: Program) -> None:
    with pair(float_program) as both:
        both.logits({0: PROMPT[:5], 1: PROMPT[:2]})
        # Decode rows first, as the scheduler puts them, and in any other order.
        assert distance(*both.logits({0: [7], 1: [8], 2: PROMPT})) < FLOAT
        assert distance(*both.logits({3: PROMPT[:9], 0: [7], 2: [9], 1: PROMPT[:6]})) < FLOAT


@pytest.mark.parametrize("quant", ["Q8_0", "F32"])
def test_a_row_has_the_same_bits_whatever_shares_its_step(tmp_path: Path, quant: str) -> None:
    with pair(tiny_program(tmp_path, quant), batch_invariant=True) as both:
        device, driver = both.cuda, both.driver
        driver.seat(0)
        driver.step({0: PROMPT})
        alone = device.logits()[0]
        driver.step({0: [77]})
        lone_decode = device.logits()[0]
        for mates in (1, 2, 4, 7):
            rows = {seat: PROMPT[: 3 + seat] for seat in range(1, mates + 1)} | {0: PROMPT}
            for seat in rows:
                driver.seat(seat)
            driver.step(rows)
            assert np.array_equal(device.logits()[mates], alone)
            driver.step({seat: [77] for seat in rows})
            assert np.array_equal(device.logits()[mates], lone_decode)


@pytest.mark.parametrize("quant", ["Q8_0", "F32"])
def test_a_row_has_the_same_bits_however_its_prompt_was_cut(tmp_path: Path, quant: str) -> None:
    with pair(tiny_program(tmp_path, quant), batch_invariant=True) as both:
        results = []
        for cuts in ([len(PROMPT)], [1] * len(PROMPT), [4, 1, 3, 15], [16, 7]):
            both.driver.seat(0)
            start = 0
            for cut in cuts:
                both.driver.step({0: PROMPT[start : start + cut]})
                start += cut
            results.append(both.cuda.logits()[0])
        for result in results[1:]:
            assert np.array_equal(result, results[0])


def test_the_previous_sample_is_the_next_token(program: Program) -> None:
    with pair(program) as both:
        for seat in range(3):
            both.driver.seat(seat)
        drawn = both.driver.step({0: PROMPT, 1: PROMPT[:4], 2: [3]}).token_ids[:3].tolist()
        both.driver.decode([0, 1, 2])
        by_reference = both.cuda.logits()
        for seat in range(3):
            both.driver.seat(seat)
        both.driver.step({0: PROMPT, 1: PROMPT[:4], 2: [3]})
        both.driver.step({seat: [token] for seat, token in enumerate(drawn)})
        assert np.array_equal(by_reference, both.cuda.logits())


def decode_batch(both: Pair, seats: list[int], position: int) -> StepBatch:
    """One more token for each of `seats`, all at `position`."""
    count = len(seats)
    batch = StepBatch(small_limits(max_seats=8))
    batch.num_rows = batch.num_sequences = batch.num_samples = count
    batch.token_ids[:count] = PREVIOUS_SAMPLE
    batch.positions[:count] = position
    batch.sequence_seats[:count] = batch.sample_seats[:count] = seats
    batch.sequence_starts[: count + 1] = np.arange(count + 1)
    batch.sample_rows[:count] = np.arange(count)
    for index, seat in enumerate(seats):
        batch.page_tables[index] = both.driver._tables[seat]
    return batch


def test_one_step_ahead_gives_the_tokens_of_one_after_the_other(program: Program) -> None:
    with pair(program) as both:
        prompts = [PROMPT[:5], PROMPT[5:10]]
        expected = both.driver.generate(prompts, 30)
        device = both.cuda
        tokens: list[list[int]] = [[], []]
        for seat, prompt in enumerate(prompts):
            both.driver.seat(seat)
            tokens[seat].append(int(both.driver.step({seat: prompt}).token_ids[0]))

        def collect() -> None:
            result = device.collect()
            for seat in range(2):
                tokens[seat].append(int(result.token_ids[seat]))

        device.submit(decode_batch(both, [0, 1], 5))
        for step in range(1, 29):
            device.submit(decode_batch(both, [0, 1], 5 + step))
            collect()
        collect()
        assert tokens == expected


SAMPLINGS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9, min_p=0.01, num_logprobs=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.2, num_logprobs=0),
    SamplingParams(temperature=1.5, seed=9, frequency_penalty=0.5, logit_bias=((7, 2.0), (9, -50.0))),
]


def test_tokens_are_those_the_host_sampler_draws_from_the_same_logits(program: Program) -> None:
    with pair(program) as both:
        host = HostSampler(8, program.dimensions.vocab_size)
        for seat, sampling in enumerate(SAMPLINGS):
            both.driver.seat(seat, sampling, history=PROMPT)
            host.seat(
                seat,
                SeatParams(
                    sampling=sampling, history=np.array(PROMPT, np.uint32), num_prompt_tokens=len(PROMPT)
                ),
            )
        result = both.driver.step(dict.fromkeys(range(4), PROMPT))
        for _ in range(8):
            expected = StepResult(8)
            positions = np.array([both.driver.lengths[seat] for seat in range(4)], np.int32)
            host.sample(both.cuda.logits(), np.arange(4, dtype=np.int32), positions, expected)
            assert result.token_ids[:4].tolist() == expected.token_ids[:4].tolist()
            np.testing.assert_allclose(result.logprobs[1:3], expected.logprobs[1:3], atol=1e-5)
            assert result.top_ids[1, :3].tolist() == expected.top_ids[1, :3].tolist()
            result = both.driver.decode(range(4))


def test_a_sequence_seated_again_with_its_history_continues_with_the_same_tokens(program: Program) -> None:
    with pair(program, batch_invariant=True) as both:
        both.driver.seat(0, SAMPLINGS[3], history=PROMPT)
        tokens = [int(both.driver.step({0: PROMPT}).token_ids[0])]
        tokens += [int(both.driver.decode([0]).token_ids[0]) for _ in range(7)]
        device = both.cuda
        past = PROMPT + tokens[:3]
        both.driver.lengths[5] = 0
        device.seat(
            5,
            SeatParams(
                sampling=SAMPLINGS[3], history=np.array(past, np.uint32), num_prompt_tokens=len(PROMPT)
            ),
        )
        again = [int(both.driver.step({5: past}).token_ids[0])]
        again += [int(both.driver.decode([5]).token_ids[0]) for _ in range(4)]
        assert again == tokens[3:]


def test_a_step_without_samples_only_fills_the_cache(program: Program) -> None:
    with pair(program, batch_invariant=True) as both:
        device, driver = both.cuda, both.driver
        driver.seat(0)
        driver.step({0: PROMPT})
        expected = device.logits()[0]
        driver.seat(0)
        batch = driver._batch
        driver.step({0: PROMPT[:10]})
        batch.num_samples = 0
        device.submit(batch)
        assert device.collect().num_samples == 0
        driver.step({0: PROMPT[10:]})
        assert np.array_equal(device.logits()[0], expected)


def poison(program: Program, token: int) -> Program:
    """The program with a token whose embedding is not a number; its embedding table is F32."""
    embed = program.operations[0]
    assert isinstance(embed, Embed)
    values = np.array(embed.table.data).view(np.float32).reshape(embed.table.shape)
    values[token] = np.nan
    table = msgspec.structs.replace(embed.table, data=values.ravel().view(np.uint8))
    poisoned = msgspec.structs.replace(embed, table=table)
    return msgspec.structs.replace(program, operations=(poisoned, *program.operations[1:]))


def test_a_row_that_is_not_a_number_harms_nobody_else(float_program: Program) -> None:
    with pair(float_program, batch_invariant=True) as both:
        both.driver.step({1: PROMPT[:5]})
        expected = both.cuda.logits()[0]
    with pair(poison(float_program, token=100), batch_invariant=True) as both:
        for _ in range(2):  # then with pages that hold what is not a number
            both.driver.seat(0)
            both.driver.seat(1)
            result = both.driver.step({0: [100, 5], 1: PROMPT[:5]})
            assert result.ok[:2].tolist() == [False, True]
            assert np.array_equal(both.cuda.logits()[1], expected)


def test_pages_of_a_failed_sequence_are_safe_to_reuse(float_program: Program) -> None:
    with pair(poison(float_program, token=100)) as both:
        both.driver.step({0: [5, 6, 7]})
        expected = both.cuda.logits()[0]
        both.driver.seat(0)
        assert not both.driver.step({0: [100] * 40}).ok[0]
        both.driver.seat(0)
        assert both.driver.step({0: [5, 6, 7]}).ok[0]
        assert np.array_equal(both.cuda.logits()[0], expected)


def test_the_most_rows_and_seats_fit(program: Program) -> None:
    limits = small_limits(max_rows=20, max_seats=20, max_context_tokens=32)
    with pair(program, limits=limits) as both:
        for seat in range(20):
            both.driver.seat(seat)
        for _ in range(2):
            result = both.driver.step({seat: [3 + seat] for seat in range(20)})
            assert result.num_samples == 20
            assert result.ok[:20].all()


def test_no_step_captures_once_it_is_warm(float_program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(float_program) as both:
        both.cuda.warm_up()
        assert both.cuda.num_graphs == 4  # of 1, 2, 4 and 8 rows
        monkeypatch.setattr(both.cuda._backend, "begin_capture", None)
        prompts = [PROMPT, PROMPT[3:9], [40], PROMPT[:17]]
        assert both.driver.generate(prompts, 6) == both.oracle.generate(prompts, 6)
        assert both.cuda.num_graphs == 4


def test_the_order_of_threads_changes_no_bit(program: Program) -> None:
    found = []
    for order in (0, 1, 7):
        with pair(program, make_backend=partial(EmulatorBackend, thread_order=order)) as both:
            both.driver.step({0: PROMPT[:9], 1: PROMPT[:2]})
            both.driver.step({0: [1], 1: [2]})
            found.append(both.cuda.logits())
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_nothing_is_allocated_once_it_is_loaded(program: Program) -> None:
    with pair(program, make_backend=EmulatorBackend) as both:
        backend = both.cuda._backend
        assert isinstance(backend, EmulatorBackend)
        before = backend.num_allocations
        both.driver.generate([PROMPT, PROMPT[:3]], 4)
        assert backend.num_allocations == before


@pytest.mark.parametrize("quant", ["Q4_1", "F16"])
def test_the_memory_it_takes_is_what_was_planned(tmp_path: Path, quant: str) -> None:
    program = tiny_program(tmp_path, quant)
    limits = small_limits(max_seats=8)
    backend = EmulatorBackend()
    free = backend.memory_info()[0]
    device = CudaDevice(program, limits, backend)
    taken = free - backend.memory_info()[0]
    weights, buffers = memory_needs(program, limits)
    sizes = program.dimensions
    page = 16 * 2 * 2 * sizes.num_kv_heads * sizes.head_size * sizes.num_layers
    planned = weights + buffers + (limits.num_pages + 1) * page
    assert taken <= planned
    assert planned < 1.1 * taken
    device.close()


def test_closing_twice_is_harmless(program: Program) -> None:
    with pair(program) as both:
        both.cuda.close()
        both.cuda.close()


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        (TinyShape(hidden_size=48, num_heads=2, num_kv_heads=2, head_size=24), r"heads of 24"),
        (TinyShape(hidden_size=48), r"rows of 48, 64, 128"),
        (TinyShape(num_heads=80, num_kv_heads=1), r"80 heads on 1"),
    ],
)
def test_a_shape_without_kernels_is_refused_by_name(tmp_path: Path, shape: TinyShape, fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"{fault}.*--device cpu"):
        CudaDevice(tiny_program(tmp_path, "F32", shape), small_limits(max_seats=2), EmulatorBackend())
