"""Stop strings: the same cut however the text arrives, nothing leaked, nothing held back in vain."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import RequestError
from ds4.text.stop import MAX_STOP_CHARS, StopMatcher

texts = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the stop that is complete first; of those, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = ""
    for chunk in chunks:
        emitted, stop = matcher.push(chunk)
        out += emitted
        if stop is not None:
            return out, stop
    return out + matcher.finish(), None


@settings(deadline=None)
@given(text=texts, stops=stop_lists, data=st.data())
def test_the_cut_does_not_depend_on_the_chunks(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(chunks, stops) == reference(text, stops)


@settings(deadline=None)
@given(text=texts, stops=stop_lists)
def test_exactly_the_longest_possible_beginning_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = sent = ""
    for character in text:
        emitted, stop = matcher.push(character)
        if stop is not None:
            return
        seen += character
        sent += emitted
        beginnings = {""} | {stop[:length] for stop in stops for length in range(len(stop))}
        longest = max(length for length in range(len(seen) + 1) if seen[len(seen) - length :] in beginnings)
        assert seen == sent + seen[len(seen) - longest :]


def test_a_stop_across_chunks_is_never_leaked() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("hi\n") == ("hi", None)
    assert matcher.push("\nUs") == ("", None)
    assert matcher.push("er: more") == ("", "\n\nUser:")


def test_text_held_in_vain_comes_out() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("st") == ("", None)
    assert matcher.push("ar") == ("star", None)
    assert matcher.push("sto") == ("", None)
    assert matcher.finish() == "sto"
    assert matcher.finish() == ""


def test_nothing_comes_out_after_a_stop() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == ("a", "x")
    assert matcher.push("c") == ("", None)
    assert matcher.finish() == ""


def test_without_stops_text_passes_through() -> None:
    for stops in ([], [""]):
        matcher = StopMatcher(stops)
        assert matcher.push("anything") == ("anything", None)
        assert matcher.finish() == ""


def test_stops_too_long_to_watch_are_the_clients_fault() -> None:
    with pytest.raises(RequestError) as caught:
        StopMatcher(["a" * (MAX_STOP_CHARS // 2 + 1)] * 2)
    assert caught.value.param == "stop"


def test_a_fresh_matcher_shares_nothing_that_changes() -> None:
    first = StopMatcher(["ab"])
    assert first.push("xa") == ("x", None)
    second = first.fresh()
    assert second.push("b") == ("b", None)
    assert first.push("b") == ("", "ab")
    assert first.fresh().push("cab") == ("c", "ab")
