"""llguidance behind the seam: whatever walk the masks allow ends in a valid document."""

import functools
import json
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ds4.grammar_library import GrammarError, GrammarVocabulary
from tests.support import schemas
from workers.sampling.grammar import GrammarConstraint, Grammars

END, OTHER_END, CONTROL = 256, 257, 258
WORDS = [
    b'{"',
    b'":',
    b'", "',
    b"true",
    b"false",
    b"null",
    b"[[",
    b"]]",
    b"}}",
    b"  ",
    b"\xc3\xa9",
    b"-1",
    b"0",
]
TOKENS = [bytes([byte]) for byte in range(256)] + [b"</s>", b"<end>", b"<tool>", *WORDS]
VOCAB = len(TOKENS) + 3  # ids without a token


@functools.cache
def grammars() -> Grammars:
    return Grammars(
        GrammarVocabulary(
            TOKENS, special_ids=[END, OTHER_END, CONTROL], end_ids=[END, OTHER_END], vocab_size=VOCAB
        )
    )


def allowed(mask: Any) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return found


def step(constraint: GrammarConstraint, token_id: int, masks: NDArray[np.uint32]) -> Sequence[int]:
    """Reads a token and fills the one mask; what the token forces."""
    (forced,) = grammars().accept([(constraint, token_id)])
    grammars().compute([(constraint, 0)], masks)
    return forced


def walk(constraint: GrammarConstraint, seed: int, limit: int = 4000) -> list[int]:
    """Tokens drawn at random among those allowed, until one ends it."""
    masks = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    random = np.random.default_rng(seed)
    output: list[int] = []
    grammars().compute([(constraint, 0)], masks)
    while len(output) < limit:
        assert constraint.failure == ""
        token_id = int(random.choice(allowed(masks[0])))
        assert token_id < len(TOKENS)
        output.append(token_id)
        if token_id in (END, OTHER_END):
            return output
        output += step(constraint, token_id, masks)
    raise AssertionError("no end")


def text_of(output: list[int]) -> str:
    return b"".join(TOKENS[token_id] for token_id in output[:-1]).decode()


scalars = st.sampled_from(
    [
        {"type": "null"},
        {"type": "boolean"},
        {"type": "integer", "minimum": -3, "maximum": 120},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]$"},
        {"enum": ["x", 1, None, 'é\n"']},
        {"const": {"k": [1, "2"]}},
    ]
)


def containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(["a", "b", "long name", "é", 'q"'])
    objects = st.dictionaries(names, inner, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties) or ["a"])).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required & properties.keys()),
                "additionalProperties": False,
            }
        )
    )
    arrays = st.tuples(inner, st.integers(0, 1), st.integers(1, 2)).map(
        lambda parts: {"type": "array", "items": parts[0], "minItems": parts[1], "maxItems": parts[2]}
    )
    return st.one_of(
        objects, arrays, st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each})
    )


@settings(deadline=None, max_examples=60)
@given(schema=st.recursive(scalars, containers, max_leaves=6), seed=st.integers(0, 1 << 30))
def test_any_walk_under_any_schema_is_a_valid_document(schema: dict[str, Any], seed: int) -> None:
    text = text_of(walk(grammars().constraint(schemas.grammar(schema)), seed))
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("seed", range(5))
def test_a_constraint_continues_after_any_part_of_its_output(seed: int) -> None:
    grammar = schemas.grammar(schemas.PERSON)
    output = walk(grammars().constraint(grammar), seed)
    one = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    other = one.copy()
    for cut in range(len(output)):
        stepped = grammars().constraint(grammar)
        grammars().compute([(stepped, 0)], one)
        for token_id in output[:cut]:
            step(stepped, token_id, one)
        grammars().compute([(grammars().constraint(grammar, output[:cut]), 0)], other)
        assert np.array_equal(one, other)


def test_after_the_document_only_the_end_tokens_are_allowed() -> None:
    masks = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    constraint = grammars().constraint(schemas.grammar({"const": 1}), [ord("1")])
    grammars().compute([(constraint, 0)], masks)
    assert allowed(masks[0]) == [END, OTHER_END]
    step(constraint, END, masks)  # drawn once more before its end is known
    assert constraint.failure == ""


def test_control_tokens_are_never_text() -> None:
    masks = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    grammars().compute([(grammars().constraint("start: /(.|\\n)+/"), 0)], masks)
    assert set(allowed(masks[0])).isdisjoint({END, OTHER_END, CONTROL, *range(len(TOKENS), VOCAB)})


def test_masks_of_many_land_in_their_own_rows() -> None:
    words = ["a", "b", "c", "d"]
    work = [(grammars().constraint(f'start: "{word}{word}"'), 2 * seat) for seat, word in enumerate(words)]
    masks = np.full((8, -(-VOCAB // 32)), 0xFFFFFFFF, np.uint32)
    grammars().compute(work, masks)
    assert [allowed(masks[2 * seat]) for seat in range(4)] == [[ord(word)] for word in words]
    assert (masks[1::2] == 0xFFFFFFFF).all()


def test_a_token_against_the_grammar_is_a_failure_and_harms_no_other() -> None:
    good, bad = grammars().constraint('start: "ab"'), grammars().constraint('start: "ab"')
    masks = np.zeros((2, -(-VOCAB // 32)), np.uint32)
    grammars().accept([(good, ord("a")), (bad, ord("x"))])
    grammars().compute([(good, 0), (bad, 1)], masks)
    assert bad.failure
    assert good.failure == ""
    assert allowed(masks[0]) == [ord("b")]


def test_compiling_in_the_background_tells_when_it_is_done() -> None:
    told: Future[None] = Future()
    future = grammars().start('start: "ok"', [], lambda: told.set_result(None))
    told.result(timeout=60)
    assert future.done()
    refused = grammars().start("start: nothing", [], lambda: None)
    with pytest.raises(GrammarError, match="nothing"):
        refused.result(timeout=60)


def test_an_output_that_does_not_fit_is_refused() -> None:
    with pytest.raises(GrammarError, match="does not allow the output so far"):
        grammars().constraint('start: "ab"', [ord("a"), ord("c")])


@settings(deadline=None, max_examples=40)
@given(schema=st.recursive(scalars, containers, max_leaves=6), seed=st.integers(0, 1 << 30))
def test_what_is_forced_is_all_that_the_masks_allow(schema: dict[str, Any], seed: int) -> None:
    grammar = schemas.grammar(schema)
    skipping = grammars().constraint(grammar, held_ids=grammars().end_ids)
    drawing, replayed = grammars().constraint(grammar), np.zeros((1, -(-VOCAB // 32)), np.uint32)
    output = walk(skipping, seed)
    mask = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    grammars().compute([(drawing, 0)], mask)
    follower = grammars().constraint(grammar, held_ids=grammars().end_ids)
    skipped: list[int] = []  # of what follows, what need not be drawn
    for position, token_id in enumerate(output):
        if skipped:
            assert allowed(mask[0]) == [token_id] == skipped[:1]
            skipped = skipped[1:]
        else:
            assert token_id in allowed(mask[0])
            skipped = list(grammars().accept([(follower, token_id)])[0])
        # One that was lost in the middle begins anew with what its client has.
        if position % 7 == 3:
            grammars().compute([(grammars().constraint(grammar, output[:position]), 0)], replayed)
            assert np.array_equal(replayed, mask)
        assert step(drawing, token_id, mask) == ()


def test_an_id_that_is_held_is_drawn() -> None:
    grammar = f'start: "a" "b" <[{CONTROL}]> "c"'
    (forced,) = grammars().accept([(grammars().constraint(grammar, held_ids=[END]), ord("a"))])
    assert forced == [ord("b"), CONTROL, ord("c")]
    held = grammars().constraint(grammar, held_ids=[END, CONTROL])
    assert grammars().accept([(held, ord("a"))]) == [[ord("b")]]
    assert grammars().accept([(held, CONTROL)]) == [[ord("c")]]
