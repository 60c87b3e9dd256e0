"""The tools of the training text: names, descriptions, questions for them, results."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from examples.builtin_model.corpus.phrasing import made_up_name, made_up_word, split
from examples.builtin_model.corpus.text_pools import Asks, Pools, asks, asks_in, pools
from examples.builtin_model.corpus.words import ACTIVITIES, CITIES, NAMES, TOPICS

Make = Callable[[Random, bool], Any]
Return = Callable[[Random], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    names: tuple[str, ...]
    type: str
    make: Make
    about: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """One thing a tool can do; `asks` use {0}, {1} for the values in the order of `parameters`."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    asks: Asks
    returns: Return


def city(random: Random, held: bool) -> str:
    return random.choice(split(CITIES, held)) if random.random() < 0.8 else made_up_name(random)


def person(random: Random, held: bool) -> str:
    return random.choice([*split(NAMES, held), made_up_name(random)])


def topic(random: Random, held: bool) -> str:
    words = " ".join(made_up_word(random) for _ in range(random.randint(1, 2)))
    known = random.choice(split(TOPICS, held)), random.choice(split(CITIES, held))
    return random.choice((*known, words))


def expression(random: Random, held: bool) -> str:
    sign = random.choice(("+", "-", "*", "/"))
    return f"{random.randint(2, 9999)} {sign} {random.randint(2, 999)}"


def number(random: Random, held: bool) -> int:
    return random.randint(1, random.choice((10, 60, 999, 9999)))


def word(random: Random, held: bool) -> str:
    return made_up_word(random)


def errand(random: Random, held: bool) -> str:
    others = ("call mom", "buy milk", "feed the cat")
    made_up = "call " + person(random, held), "buy " + word(random, held)
    return random.choice((*split(ACTIVITIES, held), *others, *made_up))


def clock(random: Random, held: bool) -> str:
    return f"{random.randint(0, 23)}:{random.randrange(0, 60, 5):02}"


def _one_of(values: list[str]) -> Make:
    return lambda random, held: random.choice(values)


def _weather(random: Random) -> Any:
    sky = random.choice(_POOLS["skies"])
    degrees = random.randint(-10, 38)
    forms: tuple[Any, ...] = (
        {"temperature": degrees, "condition": sky},
        {"temperature": degrees, "unit": "celsius", "condition": sky},
        f"{sky}, {degrees}°C",
        {"temp": degrees, "sky": sky},
        f"{degrees} degrees and {sky}",
        {"condition": sky, "temperature": degrees, "humidity": random.randint(20, 99)},
        str(degrees),
        sky,
        {"temperature": degrees},
    )
    return random.choice(forms)


def _day(random: Random) -> str:
    return f"2026-{random.randint(1, 12):02}-{random.randint(1, 28):02}"


def _time(random: Random) -> Any:
    now = clock(random, False)
    return random.choice((now, {"time": now}, {"time": now, "date": _day(random)}))


def _number(random: Random) -> Any:
    fraction = round(random.random() * 999, random.randint(1, 3))
    value = random.choice((random.randint(-999, 99999), fraction))
    return random.choice((str(value), {"result": value}, {"value": value}))


def _text(random: Random) -> Any:
    small = ["the", "is", "a", "of", "in", "one", "was", "found", "new", "old", "small", "and"]
    words = " ".join(
        random.choice((made_up_word(random), *small)) for _ in range(random.randint(3, 9))
    )
    title = {"title": words, "id": random.randint(1, 999)}
    return random.choice((words, words + ".", {"result": words}, title, {"text": words}))


def _done(random: Random) -> Any:
    return random.choice(("ok", "done", "success", {"status": "ok"}, {"success": True}))


_MAKES: dict[str, Make] = {
    "city": city, "person": person, "topic": topic, "expression": expression, "number": number,
    "word": word, "errand": errand, "clock": clock,
}  # fmt: skip
_RETURNS: dict[str, Return] = {
    "weather": _weather, "time": _time, "number": _number, "text": _text, "done": _done,
    "day": _day,
}  # fmt: skip
_POOLS = pools("tools")
_GENERIC = asks(_POOLS)["generic"]


def _parameter(table: Pools) -> Parameter:
    make = table["make"]
    maker = _MAKES[make] if isinstance(make, str) else _one_of(make)
    return Parameter(tuple(table["names"]), table["type"], maker, tuple(table["about"]))


def _kind(table: Pools) -> Kind:
    parameters = tuple(_parameter(each) for each in table.get("parameters", ()))
    returns = _RETURNS[table["returns"]]
    return Kind(tuple(table["names"]), tuple(table["about"]), parameters, asks_in(table), returns)


KINDS: dict[str, Kind] = {name: _kind(table) for name, table in _POOLS["tools"].items()}


def made_up_kind(random: Random, held: bool) -> Kind:
    """A made-up tool, so that names and parameters are read from the prompt, not memorised."""
    verb, noun = random.choice(_POOLS["verbs"]), random.choice(split(_POOLS["nouns"], held))
    if random.random() < 0.3 and not held:
        noun = made_up_word(random)
    common = f"{verb}_{noun}"
    name = random.choice((common, common, f"{verb}{noun.capitalize()}", f"{noun}_{verb}"))
    if random.random() < 0.5:
        names = f"{noun}_id", "id", f"{noun}_number", "number"
        parameter = Parameter(names, "integer", number, (f"The {noun}",))
    else:
        names = f"{noun}_name", "name", "key", noun
        maker = random.choice((word, person))
        parameter = Parameter(names, "string", maker, (f"The {noun}",))
    taught, kept = (
        tuple(ask.format(v=verb, n=noun) for ask in side)
        for side in (_GENERIC.taught, _GENERIC.kept)
    )
    about = f"{verb.capitalize()} a {noun}", f"{verb.capitalize()}s the {noun}"
    returns = random.choice((_text, _number, _done))
    return Kind((name,), about, (parameter,), Asks(taught, kept), returns)
