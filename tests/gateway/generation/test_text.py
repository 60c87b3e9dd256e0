from itertools import accumulate, islice, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.generation.text import TextStream


class Pieces:
    """Decodes id `i` to the `i`-th of the given byte strings."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def feed(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def said(stream: TextStream, calls: list[list[int]]) -> list[str]:
    """The text that each call adds; the last call is `finish`."""
    return [*(stream.feed(call) for call in calls), stream.finish()]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in pieces; places count from the front and may repeat."""
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(borders)]


def grouped(num_tokens: int, sizes: list[int]) -> list[list[int]]:
    """Ids 0, 1, … in calls of the given sizes, then one by one."""
    ids = iter(range(num_tokens))
    calls = [list(islice(ids, size)) for size in sizes]
    return [*calls, *([token] for token in ids)]


def stopped_first(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


TEXTS = st.one_of(
    st.text(max_size=30),
    st.text("ab", max_size=30),
    st.text("a👩\u200d🔥é", max_size=20),
)
DATA = st.one_of(
    TEXTS.map(str.encode),
    st.binary(max_size=20),
    st.lists(st.one_of(st.binary(max_size=3), TEXTS.map(str.encode)), max_size=6).map(b"".join),
)
STOPS = st.lists(
    st.one_of(
        st.text("ab", min_size=1, max_size=5),
        st.text(min_size=1, max_size=3),
        st.text("a👩\u200d🔥é\ufffd", min_size=1, max_size=4),
    ),
    max_size=4,
)
PLACES = st.lists(st.integers(0, 200), max_size=40)


@settings(deadline=None, max_examples=300)
@given(data=DATA, stops=STOPS, places=PLACES, sizes=st.lists(st.integers(0, 5), max_size=10))
@example(b"aab", ["aab", "ab"], [1, 2], [])
@example(b"abcd", ["abcd", "bc"], [], [4])
@example("x👩‍🔥y".encode(), ["\u200d🔥"], list(range(20)), [])
@example(b"\xf0\x9f\x91", [], [1, 2], [])
@example(b"\xe2\x82A\xf0\x90\x80", [], [1, 2, 3, 4, 5], [])
def test_any_split_gives_the_same_text(
    data: bytes, stops: list[str], places: list[int], sizes: list[int]
) -> None:
    pieces = cut(data, places)
    stream = TextStream(Pieces(pieces), stops)
    deltas = said(stream, grouped(len(pieces), sizes))
    text, stop = stopped_first(data.decode("utf-8", "replace"), stops)
    assert ("".join(deltas), stream.matched_stop) == (text, stop)
    assert stream.is_stopped == (stop is not None)


@settings(deadline=None)
@given(text=TEXTS, places=PLACES)
def test_a_split_character_never_becomes_a_replacement_character(
    text: str, places: list[int]
) -> None:
    text = text.replace("\ufffd", "")
    pieces = cut(text.encode(), places)
    stream = TextStream(Pieces(pieces))
    deltas = said(stream, [[token] for token in range(len(pieces))])
    assert not any("\ufffd" in delta for delta in deltas)
    # Nothing waits longer than it must: every whole character has been shown.
    ends = accumulate(map(len, pieces))
    shown = list(accumulate(deltas[:-1]))
    assert shown == [text.encode()[:end].decode("utf-8", "ignore") for end in ends]


def test_invalid_bytes_become_a_replacement_character_at_once() -> None:
    stream = TextStream(Pieces([b"\xf0\x9f", b"A", b"\xff", b"\xe2\x82"]))
    assert said(stream, [[0], [1], [2], [3]]) == ["", "\ufffdA", "\ufffd", "", "\ufffd"]


def test_only_a_prefix_of_a_stop_string_is_buffered() -> None:
    stream = TextStream(
        Pieces([b"one\n", b"\ntwo", b" User", b"s, User", b":"]), ["\n\n\n", "User:"]
    )
    deltas = [stream.feed([token]) for token in range(5)]
    assert deltas == ["one", "\n\ntwo", " ", "Users, ", ""]
    assert stream.matched_stop == "User:"


def test_buffered_text_is_returned_at_the_end() -> None:
    stream = TextStream(Pieces([b"a<", b"/s"]), ["</s>"])
    assert said(stream, [[0], [1]]) == ["a", "", "</s"]
    assert stream.matched_stop is None


def test_after_a_stop_string_no_text_is_returned() -> None:
    stream = TextStream(Pieces([b"a. b", b". c"]), [". ", "b"])
    assert said(stream, [[0, 1], [1], []]) == ["a", "", "", ""]
    assert stream.matched_stop == ". "


@pytest.mark.parametrize("stop", ["\ufffd", "a\ufffd"])
def test_an_incomplete_last_character_may_complete_a_stop_string(stop: str) -> None:
    stream = TextStream(Pieces([b"xa\xf0"]), [stop])
    assert "".join(said(stream, [[0]])) == "xa\ufffd".removesuffix(stop)
    assert stream.matched_stop == stop


def test_no_tokens_add_no_text() -> None:
    stream = TextStream(Pieces([]), ["x"])
    assert said(stream, [[], []]) == ["", "", ""]
