"""Skill: four lines of verse about anything, always in the same form."""

from random import Random

from examples.builtin_model.corpus.example import Example, containing, turn
from examples.builtin_model.corpus.phrasing import capital, made_up_word, request, split
from examples.builtin_model.corpus.text_pools import asks, pools
from examples.builtin_model.corpus.words import ANIMALS, COLOURS, FOODS, TOPICS

_POOLS = pools("stories")
_ASKS = asks(_POOLS)["poem"]


def poem(random: Random, held: bool) -> Example:
    noun = random.choice(split([*ANIMALS, *FOODS, *TOPICS, *COLOURS], held))
    x = random.choice(
        (noun, noun, f"the {noun}" if noun in ANIMALS else noun, made_up_word(random))
    )
    lines = [
        random.choice(_POOLS["poem_first"]).format(x=x, X=capital(x)),
        *random.choice(_POOLS["poem_rest"]),
    ]
    text = "\n".join(lines)
    least = 60
    return turn(
        "stories",
        request(random, _ASKS.pick(random, held, x=x)),
        text,
        containing(x, "\n", least=least),
    )
