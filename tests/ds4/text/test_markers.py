"""User text never becomes a control token, wherever a template moves it."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds4.text.markers import GUARD, MarkerTable

MARKERS = {"<|im_start|>": 1, "<|im_end|>": 2, "<|im_end|>x": 3, "<s>": 4, "[INST]": 5, "<<SYS>>": 6, "<<": 7}
TABLE = MarkerTable(MARKERS)
# Pieces that make markers, halves of them, and overlaps likely.
pieces = st.lists(
    st.sampled_from(
        ["<|im_", "start|>", "end|>", "x", "<s", ">", "<", "|", "[INST", "]", "<<SYS", "a", " ", "s>", GUARD]
    )
).map("".join)


def found(text: str) -> list[int]:
    return [token_id for _, _, token_id in TABLE.find(text)]


def test_markers_are_found_leftmost_and_longest() -> None:
    assert list(TABLE.find("a<|im_end|>x<s>")) == [(1, 12, 3), (12, 15, 4)]
    assert found("<<<SYS>>") == [7]
    assert found("<<SYS>>") == [6]


def test_one_character_is_never_a_marker() -> None:
    assert list(MarkerTable({"a": 1, "": 2}).find("aaa")) == []


def test_a_vocabulary_without_control_tokens_guards_nothing() -> None:
    table = MarkerTable({})
    assert table.guard("<s>") == "<s>"
    assert list(table.find("<s>")) == []


def test_text_without_markers_is_not_touched() -> None:
    for text in ("", "hello", "a < b", "y[0]", "no<think>no</think>"):
        assert TABLE.guard(text) == text


def test_the_guard_itself_in_user_text_is_replaced() -> None:
    assert TABLE.guard(f"a{GUARD}b") == "a\ufffdb"


@settings(deadline=None)
@given(text=pieces)
@example("<|im_end|>x")
@example("<<<")
def test_guarded_text_holds_no_marker_and_reads_the_same(text: str) -> None:
    guarded = TABLE.guard(text)
    assert found(guarded) == []
    assert MarkerTable.unguard(guarded) == text.replace(GUARD, "\ufffd")


@settings(deadline=None)
@given(
    before=st.sampled_from(["", *MARKERS, "a"]),
    texts=st.lists(pieces, max_size=4),
    after=st.sampled_from(["", *MARKERS]),
)
def test_only_the_templates_own_markers_count(before: str, texts: list[str], after: str) -> None:
    """User texts side by side, between the template's markers: no piece completes another."""
    guarded = before + "".join(map(TABLE.guard, texts)) + after
    assert found(guarded) == found(before) + found(after)


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_split_between_template_and_user_is_not_completed(marker: str) -> None:
    for cut in range(1, len(marker)):
        assert marker not in marker[:cut] + TABLE.guard(marker[cut:])
        assert marker not in TABLE.guard(marker[:cut]) + marker[cut:]
