"""The segment's parts: where they lie and that both sides must agree."""

import itertools

import msgspec
import pytest

from ds4.ring import layout
from ds4.ring.layout import Offsets, RingShape

SHAPES = [
    RingShape(num_front_ends=1, slots_per_front_end=1),
    RingShape(num_front_ends=3, slots_per_front_end=5, descriptor_bytes=512, events_per_slot=14),
    RingShape(num_front_ends=64, slots_per_front_end=64),
    RingShape(num_front_ends=4, slots_per_front_end=1024),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_do_not_overlap_and_start_on_pages(shape: RingShape) -> None:
    offsets = shape.offsets()
    at = [getattr(offsets, name) for name in Offsets.__struct_fields__]
    sizes = [
        shape.num_front_ends * layout.LINE_BYTES,
        shape.num_front_ends * layout.LINE_BYTES,
        shape.num_front_ends * shape.command_capacity * 16,
        shape.num_slots * 8,
        shape.num_slots * 32,
        shape.num_slots * layout.TEXT_BYTES,
        shape.num_slots * shape.descriptor_bytes,
        shape.num_front_ends * shape.event_capacity * 32,
    ]
    assert at[0] >= layout.INFO_OFFSET + layout.MAX_INFO_BYTES
    assert all(offset % layout.PAGE_BYTES == 0 for offset in at)
    assert all(
        stop - start >= size for (start, stop), size in zip(itertools.pairwise(at), sizes, strict=True)
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_an_event_ring_holds_two_full_steps_and_every_ending(shape: RingShape) -> None:
    slots = shape.slots_per_front_end
    assert shape.event_capacity >= 2 * slots * layout.MAX_RECORDS_PER_TOKEN + slots
    assert shape.event_capacity & (shape.event_capacity - 1) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_command_ring_holds_all_that_can_be_outstanding(shape: RingShape) -> None:
    assert shape.command_capacity > 3 * shape.slots_per_front_end
    assert shape.command_capacity & (shape.command_capacity - 1) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_front_ends", 4), ("slots_per_front_end", 6), ("descriptor_bytes", 1024), ("events_per_slot", 20)],
)
def test_the_checksum_tells_shapes_apart(field: str, value: int) -> None:
    shape = SHAPES[1]
    assert msgspec.structs.replace(shape, **{field: value}).checksum() != shape.checksum()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_front_ends", 0),
        ("num_front_ends", layout.MAX_FRONT_ENDS + 1),
        ("slots_per_front_end", 0),
        ("slots_per_front_end", layout.MAX_SLOTS_PER_FRONT_END + 1),
        ("descriptor_bytes", 256),
        ("descriptor_bytes", 4095),
        ("events_per_slot", 13),
        ("events_per_slot", 1025),
    ],
)
def test_a_shape_that_cannot_work_is_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field if field.startswith(("desc", "ev")) else str(value)):
        RingShape(**{field: value})


def test_live_words_and_blocks_share_no_line() -> None:
    words = (
        layout.LIVE_SLEEP,
        layout.LIVE_HEARTBEAT,
        layout.LIVE_STATE,
        layout.LIVE_STEPS,
        layout.LIVE_RUNNING,
        layout.INFO_OFFSET // 8,
    )
    assert layout.HEADER_WORDS <= layout.LINE_WORDS
    assert len({word // layout.LINE_WORDS for word in words}) == len(words)
