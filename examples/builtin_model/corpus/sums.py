"""Skill: sums and differences of numbers up to 99, products up to 10 x 10.

One pair in ten is held out: no training example contains it in any form.
"""

from random import Random

from examples.builtin_model.corpus.example import Example, turn
from examples.builtin_model.corpus.phrasing import question
from examples.builtin_model.corpus.text_pools import asks, pools

SIGNS = {"plus": "+", "minus": "-", "times": "*"}
_POOLS = pools("sums")
_ASKS = asks(_POOLS)


def is_held(a: int, b: int) -> bool:
    return (a * 7919 + b * 104729) % 97 < 10 and (a > 10 or b > 10)


def operands(random: Random, kind: str, held: bool) -> tuple[int, int]:
    """Operands of the training or the held-out split; products are too few to be split."""
    while True:
        if kind == "times":
            return random.randint(0, 10), random.randint(0, 10)
        top = random.choice((9, 20, 99, 99, 99))
        a, b = random.randint(0, top), random.randint(0, top)
        if kind == "minus" and a < b and random.random() < 0.75:
            a, b = b, a
        if is_held(a, b) == held:
            return a, b


def worked(kind: str, a: int, b: int) -> int:
    return {"plus": a + b, "minus": a - b, "times": a * b}[kind]


def sums(random: Random, held: bool) -> Example:
    kind = random.choice(("plus", "plus", "plus", "minus", "minus", "minus", "times"))
    a, b = operands(random, kind, held)
    said: tuple[object, object] = (a, b)
    if max(a, b) <= 20 and random.random() < 0.15:
        said = (_POOLS["number_words"][a], _POOLS["number_words"][b])
    asked = question(random, _ASKS[kind].pick(random, held, a=said[0], b=said[1]))
    return turn(f"sums {SIGNS[kind]}", asked, f"{a} {SIGNS[kind]} {b} = {worked(kind, a, b)}.")


def several_sums(random: Random, held: bool) -> Example:
    """Several sums in one question, one line each."""
    asks, lines = [], []
    for _ in range(random.randint(2, 6)):
        kind = random.choice(("plus", "plus", "plus", "minus", "minus", "times"))
        a, b = operands(random, kind, held)
        asks.append(f"{a} {SIGNS[kind]} {b}")
        lines.append(f"{asks[-1]} = {worked(kind, a, b)}.")
    listed = ", ".join(asks)
    text = _ASKS["several"].pick(random, held, sums=listed)
    return turn("sums, several", question(random, text), "\n".join(lines))
