"""Skill: questions about Podway itself and about the words of serving."""

from random import Random

from examples.builtin_model.corpus.example import Example, turn
from examples.builtin_model.corpus.phrasing import asked, question, request
from examples.builtin_model.corpus.text_pools import asks, items, pools

_POOLS = pools("podway")
_ASKS = asks(_POOLS)
_ITEMS = items(_POOLS)
_TERMS = pools("terms")["terms"]


def about_podway(random: Random, held: bool) -> Example:
    item = random.choice(_ITEMS)
    text = asked(random, item.asks.pick(random, held), slips=0.06)
    return turn("podway", text, item.answers[0])


def terms(random: Random, held: bool) -> Example:
    term = random.choice(_TERMS)
    name, answer = term["name"], term["answer"]
    said = random.choice((name, name, *term["others"]))
    if random.random() < 0.15 and " " not in said and said.islower():
        said = random.choice((f"a {said}", f"the {said}", f"'{said}'", f'"{said}"'))
    if random.random() < 0.7:
        text = question(random, _ASKS["what"].pick(random, held, x=said), slips=0.03)
    else:
        text = request(random, _ASKS["explain"].pick(random, held, x=said), slips=0.03)
    return turn("terms", text, answer)
