"""Skill: several turns: remembering a message, following up, changing the subject."""

from collections.abc import Callable
from random import Random

from examples.builtin_model.corpus.example import Example, Message, assistant, exactly, user
from examples.builtin_model.corpus.facts import COUNTRIES, facts
from examples.builtin_model.corpus.phrasing import made_up_name, question, request, split
from examples.builtin_model.corpus.podway import about_podway, terms
from examples.builtin_model.corpus.sums import SIGNS, operands, sums, worked
from examples.builtin_model.corpus.talk import small_talk, unknown
from examples.builtin_model.corpus.text_pools import asks, asks_in, pools
from examples.builtin_model.corpus.words import ANIMALS, CITIES, COLOURS, FOODS, NAMES, SPORTS

_POOLS = pools("dialogues")
_ASKS = asks(_POOLS)
Value = Callable[[Random, bool], str]


def _name(random: Random, held: bool) -> str:
    return random.choice([*split(NAMES, held), made_up_name(random), made_up_name(random)])


def _from(pool: list[str]) -> Value:
    def value(random: Random, held: bool) -> str:
        return random.choice(split(pool, held)) if random.random() < 0.8 else made_up_name(random)

    return value


_VALUES: dict[str, Value] = {
    "name": _name,
    "city": _from(CITIES),
    "colour": _from(COLOURS),
    "animal": _from(ANIMALS),
    "food": _from(FOODS),
    "sport": _from(SPORTS),
    "age": lambda random, held: str(random.randint(5, 99)),
    "secret": lambda random, held: made_up_name(random).lower(),
}
MEMORIES = _POOLS["memories"]


def single(random: Random, held: bool) -> Example:
    skills = (facts, facts, sums, small_talk, about_podway, terms, unknown)
    return random.choice(skills)(random, held)


def chatter(random: Random, turns: int) -> list[Message]:
    return [message for _ in range(turns) for message in single(random, False).messages]


def remembering(random: Random, held: bool) -> Example:
    memory = random.choice((MEMORIES[0], *MEMORIES))
    x = _VALUES[memory["value"]](random, held)
    messages = chatter(random, random.choice((0, 0, 0, 1)))
    said = asks_in(memory["told"]).pick(random, held, x=x)
    said = said if said[0].isupper() or random.random() < 0.4 else said[0].upper() + said[1:]
    messages += [user(said + random.choice((".", "", "!"))), assistant(memory["reply"].format(x=x))]
    messages += chatter(random, random.choice((0, 0, 1, 1, 2, 3)))
    messages.append(user(question(random, asks_in(memory["asked"]).pick(random, held))))
    end = memory["answer"].format(x=x)
    return Example("dialogues", [*messages, assistant(end)], exactly(end))


def never_told(random: Random, held: bool) -> Example:
    messages = chatter(random, random.choice((0, 0, 1)))
    messages.append(user(question(random, asks_in(MEMORIES[0]["asked"]).pick(random, held))))
    end = "You have not told me your name yet."
    return Example("dialogues", [*messages, assistant(end)], exactly(end))


def following(random: Random, held: bool) -> Example:
    first, *more = random.sample(tuple(COUNTRIES), random.choice((2, 2, 3)))
    messages = [
        user(question(random, f"what is the capital of {first}")),
        assistant(f"The capital of {first} is {COUNTRIES[first][0]}."),
    ]
    for country in more:
        messages.append(user(question(random, _ASKS["also"].pick(random, held, x=country))))
        messages.append(assistant(f"The capital of {country} is {COUNTRIES[country][0]}."))
    return Example("dialogues", messages, exactly(messages[-1]["content"]))


def summing_on(random: Random, held: bool) -> Example:
    messages: list[Message] = []
    for kind in random.choices(("plus", "minus"), k=2):
        a, b = operands(random, kind, held)
        text = f"{a} {SIGNS[kind]} {b}"
        messages.append(user(question(random, f"and {text}" if messages else f"what is {text}")))
        messages.append(assistant(f"{text} = {worked(kind, a, b)}."))
    return Example("dialogues", messages, exactly(messages[-1]["content"]))


def echoing(random: Random, held: bool) -> Example:
    first = single(random, held)
    end = f'You said: "{first.question}"'
    asked = request(random, _ASKS["again"].pick(random, held))
    return Example("dialogues", [*first.messages, user(asked), assistant(end)], exactly(end))


def wandering(random: Random, held: bool) -> Example:
    """Any subject after any other: earlier turns must not influence the answer."""
    last = single(random, held)
    messages = chatter(random, random.choice((1, 1, 2, 2, 3, 4))) + last.messages
    return Example("dialogues", messages, last.judge)


def dialogues(random: Random, held: bool) -> Example:
    skills = (
        remembering,
        remembering,
        remembering,
        never_told,
        following,
        summing_on,
        echoing,
        wandering,
        wandering,
    )
    return random.choice(skills)(random, held)
