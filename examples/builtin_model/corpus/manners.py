"""Skill: following simple system messages."""

from random import Random

from examples.builtin_model.corpus.example import Example, Judge, assistant, exactly, system, user
from examples.builtin_model.corpus.facts import facts
from examples.builtin_model.corpus.phrasing import (
    capital,
    made_up_name,
    made_up_word,
    question,
    split,
)
from examples.builtin_model.corpus.sums import sums
from examples.builtin_model.corpus.talk import small_talk
from examples.builtin_model.corpus.text_pools import asks, pools
from examples.builtin_model.corpus.words import ANIMALS, NAMES

_POOLS = pools("manners")
_ASKS = asks(_POOLS)
PLAIN: list[str] = _POOLS["plain"]


def _single(random: Random, held: bool) -> Example:
    return random.choice((facts, sums, small_talk))(random, held)


def _word(random: Random, held: bool) -> str:
    word = random.choice(
        (
            made_up_word(random),
            random.choice(split(ANIMALS, held)),
            random.choice(("meow", "over", "sir", "thank you", "yes", "beep")),
        )
    )
    return capital(word) if random.random() < 0.5 else word


def manners(random: Random, held: bool) -> Example:
    inner, word = _single(random, held), _word(random, held)
    way = random.randrange(5)
    if way == 0:
        order, answer = _ASKS["end"].pick(random, held, x=word), f"{inner.answer} {word}"
    elif way == 1:
        order, answer = _ASKS["start"].pick(random, held, x=word), f"{word} {inner.answer}"
    elif way == 2:
        name = random.choice([*split(NAMES, held), made_up_name(random)])
        order, answer = _ASKS["called"].pick(random, held, x=name), f"My name is {name}."
        asked = question(random, _ASKS["who"].pick(random, held))
        return Example("system", [system(order), user(asked), assistant(answer)], exactly(answer))
    elif way == 3:
        text = inner.answer.replace('"', "'")
        order, answer = _ASKS["json"].pick(random, held), f'{{"answer": "{text}"}}'
    else:
        order, answer = _ASKS["only"].pick(random, held, x=word), word
    judge: Judge = exactly(answer)
    if way != 4 and inner.domain == "talk":  # several are right: judge the frame and any of them

        def judge(text: str) -> bool:
            bare = text.replace(word, "", 1).strip() if way < 2 else text[len('{"answer": "') : -2]
            return inner.judge(bare) and (way == 3 or word in text)

    return Example("system", [system(order), user(inner.question), assistant(answer)], judge)
