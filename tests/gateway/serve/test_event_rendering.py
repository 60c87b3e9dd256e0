from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.ports import CallArguments, CallBegin, Piece, Reasoning
from gateway.schema.anthropic.renderer import MessagesRenderer
from gateway.schema.rendering import ChoiceEnd, Usage, finished_choice
from gateway.schema.responses.renderer import ResponsesRenderer

TEXTS = st.text('aé🙂"\n', min_size=1, max_size=6)
ENDS = st.sampled_from(
    [ChoiceEnd("stop"), ChoiceEnd("length"), ChoiceEnd("stop", "###"), ChoiceEnd("tool_calls")]
)


class Tally:
    """Counts that are given."""

    usage = Usage(9, 5, 4, 2)


@st.composite
def answers(draw: st.DrawFn) -> list[Piece]:
    """Pieces in any order; the arguments of a call follow its beginning."""
    pieces: list[Piece] = []
    calls = count()
    for kind in draw(st.lists(st.sampled_from(["text", "thought", "call"]), max_size=6)):
        if kind == "text":
            pieces.append(draw(TEXTS))
        elif kind == "thought":
            pieces.append(Reasoning(draw(TEXTS)))
        else:
            index = next(calls)
            pieces.append(CallBegin(index, f"call_{index}", "add"))
            for text in draw(st.lists(st.sampled_from(['{"a":', "1}", "[", "{}"]), max_size=3)):
                pieces.append(CallArguments(index, text))
    return pieces


@st.composite
def cuts(draw: st.DrawFn, pieces: list[Piece]) -> list[list[Piece]]:
    """The same answer, its texts cut anywhere, gathered in any way."""
    small: list[Piece] = []
    for piece in pieces:
        match piece:
            case str():
                small += _cut(draw, piece, str)
            case Reasoning(text):
                small += _cut(draw, text, Reasoning)
            case CallArguments(index, text):
                small += _cut(draw, text, partial(CallArguments, index))
            case _:
                small.append(piece)
    groups: list[list[Piece]] = [[]]
    for piece in small:
        if draw(st.booleans()):
            groups.append([])
        groups[-1].append(piece)
    return [group for group in groups if group]


def _cut(draw: st.DrawFn, text: str, make: Callable[[str], Piece]) -> list[Piece]:
    at = draw(st.integers(0, len(text)))
    return [make(part) for part in (text[:at], text[at:]) if part]


@st.composite
def cut_answers(draw: st.DrawFn) -> tuple[list[Piece], list[list[Piece]], ChoiceEnd]:
    pieces = draw(answers())
    return pieces, draw(cuts(pieces)), draw(ENDS)


def names() -> Callable[[str], str]:
    numbers = count()
    return lambda prefix: f"{prefix}{next(numbers)}"


def events_of(stream: bytes) -> list[Any]:
    frames = stream.split(b"\n\n")[:-1]
    return [orjson.loads(frame.partition(b"\ndata: ")[2]) for frame in frames]


def streamed(
    frames: ResponsesRenderer | MessagesRenderer, groups: list[list[Piece]], end: ChoiceEnd
) -> Any:
    parts = [frames.delta(0, group, Tally()) for group in groups]
    stream = b"".join([*parts, frames.ending(0, end, Tally()), frames.closing(Tally())])
    return events_of(stream)


def response_frames() -> ResponsesRenderer:
    return ResponsesRenderer({"id": "resp_1"}, names(), lambda: 7)


@given(cut_answers())
def test_the_events_of_a_response_add_up_to_the_response(
    case: tuple[list[Piece], list[list[Piece]], ChoiceEnd],
) -> None:
    pieces, groups, end = case
    whole = orjson.loads(response_frames().whole([finished_choice(pieces, end)], Tally()))
    events = streamed(response_frames(), groups, end)
    assert events[-1]["response"] == whole
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    texts = dict.fromkeys(range(len(whole["output"])), "")
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    for item, text in zip(whole["output"], texts.values(), strict=True):
        assert text == (
            item.get("arguments") if "arguments" in item else item["content"][0]["text"]
        )
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]


@given(cut_answers())
def test_the_events_of_a_message_add_up_to_the_message(
    case: tuple[list[Piece], list[list[Piece]], ChoiceEnd],
) -> None:
    pieces, groups, end = case
    frames = MessagesRenderer("m", names(), "req_1")
    whole = orjson.loads(frames.whole([finished_choice(pieces, end)], Tally()))
    events = streamed(MessagesRenderer("m", names(), "req_1"), groups, end)
    content: list[Any] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(content)
                content.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                add(content[event["index"]], event["delta"])
    for block in content:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = read(written)
    assert content == whole["content"]
    *_, last, stop = events
    assert stop == {"type": "message_stop"}
    assert last["delta"] == {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    assert last["usage"] == whole["usage"]


def add(block: Any, delta: Any) -> None:
    match delta["type"]:
        case "input_json_delta":
            block["json"] += delta["partial_json"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case _:
            name = delta["type"].removesuffix("_delta")
            block[name] += delta[name]


def read(arguments: str) -> Any:
    try:
        found = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {"unparsed": arguments}
