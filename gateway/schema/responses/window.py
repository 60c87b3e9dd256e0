"""The window of a conversation: as many of its items as show what the chat template does with new
ones.

    system … question … ─────── last items ─────── output │ new
    └ head ┘ └ head ┘           └ behind the head, at least MIN_ITEMS ┘

A template may render earlier messages anew once another one follows. Most that do so look at the
last question of the user, such as to leave out the reasoning before it. So the window has the last
question, and all items behind the last question if the new items have another one.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from gateway.schema.responses.items import Item

MIN_ITEMS = 12  # before the output: some exchanges, to see whether they are rendered as before
_QUESTION, _SYSTEM = "user", ("system", "developer")


class Window(NamedTuple):
    """Its items as far as the prompt before this turn had them, and up to this turn."""

    earlier: list[Item]
    now: list[Item]


def window_of(items: Sequence[Item], num_earlier: int, new: Sequence[Item]) -> Window | None:
    """The window of a conversation, of which the last prompt had the first `num_earlier` items and
    the rest is the output; None if it would have most of them, or an answer is among the new ones.
    """
    if not all(map(_is_input, new)):
        return None
    head = list(takewhile(lambda item: item.get("role") in _SYSTEM, items[:num_earlier]))
    questions = [at for at, item in enumerate(items[:num_earlier]) if _is_question(item)]
    target = num_earlier - MIN_ITEMS
    earlier_ones = [at for at in questions if at <= target]
    last = earlier_ones[-1] if earlier_ones else 0
    start, question = last, []
    if not any(map(_is_question, new)) and earlier_ones == questions:
        answer = _start_of_answer(items, last, target)
        if answer is not None:
            start, question = answer, [items[at] for at in earlier_ones[-1:]]
    if start <= len(head) + len(question):
        return None
    head += question
    return Window([*head, *items[start:num_earlier]], [*head, *items[start:], *new])


def _is_question(item: Item) -> bool:
    return item.get("role") == _QUESTION


def _is_input(item: Item) -> bool:
    """Whether the model did not write it, nor its instructions."""
    return _is_question(item) or str(item["type"]).endswith("_output")


def _start_of_answer(items: Sequence[Item], first: int, target: int) -> int | None:
    """The last place behind `first`, up to `target`, at which the model begins to write."""
    places = range(target, first, -1)
    return next(
        (at for at in places if not _is_input(items[at]) and _is_input(items[at - 1])), None
    )
