"""Skill: a few hundred small facts, asked in many ways."""

from random import Random

from examples.builtin_model.corpus.example import Example, turn
from examples.builtin_model.corpus.phrasing import capital, question, with_article
from examples.builtin_model.corpus.text_pools import Asks, asks, items, pools

_POOLS = pools("facts")
_ASKS = asks(_POOLS)
_SINGLES = items(pools("single_facts"))
COUNTRIES: dict[str, tuple[str, str, str]] = {
    country: tuple(known) for country, known in _POOLS["countries"].items()
}
DAYS: list[str] = _POOLS["days"]
_ROWS = (("day", DAYS), ("month", _POOLS["months"]), ("planet", _POOLS["planets"]))


def _say(asks: Asks, random: Random, held: bool, **fields: object) -> str:
    return question(random, asks.pick(random, held, **fields))


def countries(random: Random, held: bool) -> Example:
    country, (city, continent, language) = random.choice(tuple(COUNTRIES.items()))
    kind = random.random()
    if kind < 0.5:
        way, x, answer = "capital", country, f"The capital of {country} is {city}."
    elif kind < 0.7:
        way, x, answer = "capital_of", city, f"{city} is the capital of {country}."
    elif kind < 0.85:
        way, x, answer = "continent", country, f"{capital(country)} is in {continent}."
    else:
        way, x, answer = "language", country, f"People in {country} speak {language}."
    return turn("facts", _say(_ASKS[way], random, held, x=x), answer)


def calendar(random: Random, held: bool) -> Example:
    kind, row = random.choice(_ROWS)
    at = random.randrange(len(row))
    way = random.random()
    if way < 0.35 and (kind != "planet" or at + 1 < len(row)):
        answer = f"{row[(at + 1) % len(row)]} comes after {row[at]}."
        return turn("facts", _say(_ASKS["after"], random, held, kind=kind, x=row[at]), answer)
    if way < 0.7 and (kind != "planet" or at > 0):
        answer = f"{row[at - 1]} comes before {row[at]}."
        return turn("facts", _say(_ASKS["before"], random, held, kind=kind, x=row[at]), answer)
    if kind == "month" and way > 0.85:
        answer = f"{row[at]} has {_POOLS['month_days'][at]} days."
        return turn("facts", _say(_ASKS["month_days"], random, held, x=row[at]), answer)
    ordinal = _POOLS["ordinals"][at]
    of = {"day": "day of the week", "month": "month of the year", "planet": "planet from the sun"}
    asked = _say(_ASKS["nth"], random, held, kind=of[kind] if way < 0.95 else kind, n=ordinal)
    return turn("facts", asked, f"The {ordinal} {of[kind]} is {row[at]}.")


def things(random: Random, held: bool) -> Example:
    kind = random.randrange(6)
    if kind == 0:
        x, colour = random.choice(tuple(_POOLS["colours"].items()))
        return turn("facts", _say(_ASKS["colour"], random, held, x=x), f"{capital(x)} is {colour}.")
    if kind == 1:
        x, y = random.choice(tuple(_POOLS["opposites"].items()))
        return turn(
            "facts", _say(_ASKS["opposite"], random, held, x=x), f"The opposite of {x} is {y}."
        )
    if kind == 2:
        x, y = random.choice(tuple(_POOLS["sounds"].items()))
        return turn("facts", _say(_ASKS["sound"], random, held, x=x), f"{capital(x)} says {y}.")
    if kind == 3:
        x, y = random.choice(tuple(_POOLS["young"].items()))
        asked = _say(_ASKS["young"], random, held, x=x, ax=with_article(x))
        return turn("facts", asked, f"A baby {x} is called a {y}.")
    if kind == 4:
        x, y = random.choice(tuple(_POOLS["legs"].items()))
        return turn("facts", _say(_ASKS["legs"], random, held, x=x), f"{capital(x)} has {y} legs.")
    number, a, b = random.choice(_POOLS["units"]["rows"])
    return turn(
        "facts", _say(_ASKS["unit"], random, held, a=a, b=b), f"There are {number} {a} in {b}."
    )


def singles(random: Random, held: bool) -> Example:
    item = random.choice(_SINGLES)
    return turn("facts", question(random, item.asks.pick(random, held)), item.answers[0])


def facts(random: Random, held: bool) -> Example:
    skills = (countries, countries, calendar, things, things, singles)
    return random.choice(skills)(random, held)
