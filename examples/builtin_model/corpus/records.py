"""Skill: JSON when asked for it: facts, people, sums, lists, events, given keys."""

import json
from random import Random
from typing import Any

from examples.builtin_model.corpus.example import (
    Example,
    Judge,
    assistant,
    same_json,
    system,
    turn,
    user,
)
from examples.builtin_model.corpus.facts import COUNTRIES, DAYS
from examples.builtin_model.corpus.lists import KINDS, NUMBERS, run
from examples.builtin_model.corpus.phrasing import made_up_name, made_up_word, request, split
from examples.builtin_model.corpus.sums import operands, worked
from examples.builtin_model.corpus.text_pools import asks, pools
from examples.builtin_model.corpus.words import CITIES, COLOURS, JOBS, NAMES, SURNAMES

_POOLS = pools("records")
_ASKS = asks(_POOLS)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def country(random: Random, held: bool) -> Example:
    name, (city, *_) = random.choice(tuple(COUNTRIES.items()))
    value = {"name": name.removeprefix("the "), "capital": city}
    return turn(
        "json",
        request(random, _ASKS["country"].pick(random, held, x=name)),
        _json(value),
        same_json(value),
    )


def person(random: Random, held: bool) -> Example:
    name = random.choice([*split(NAMES, held), made_up_name(random)])
    if random.random() < 0.25:
        name += " " + random.choice(SURNAMES)
    value: dict[str, Any] = {"name": name, "age": random.randint(1, 99)}
    said = random.choice(
        (
            f"{name}, {value['age']} years old",
            f"{name}, age {value['age']}",
            f"{name}, {value['age']}",
            f"{name} who is {value['age']} years old",
        )
    )
    if random.random() < 0.6:
        value["city"] = random.choice([*split(CITIES, held), made_up_name(random)])
        said += random.choice(
            (
                f", from {value['city']}",
                f", lives in {value['city']}",
                f" and lives in {value['city']}",
                f", who lives in {value['city']}",
            )
        )
    if random.random() < 0.3:
        value["job"] = random.choice(JOBS)
        said += random.choice(
            (f", a {value['job']}", f", works as a {value['job']}", f", job: {value['job']}")
        )
    if random.random() < 0.3:
        said = "a person named " + said
    return turn(
        "json",
        request(random, _ASKS["person"].pick(random, held, x=said)),
        _json(value),
        same_json(value),
    )


def invented(random: Random, held: bool) -> Example:
    first, last = random.choice(NAMES), random.choice(SURNAMES)
    field: dict[str, Any] = {
        "name": first,
        "age": random.randint(18, 80),
        "city": random.choice(CITIES),
        "job": random.choice(JOBS),
        "email": f"{first.lower()}@example.com",
        "id": random.randint(1, 999),
        "color": random.choice(COLOURS),
        "active": random.random() < 0.5,
        "first_name": first,
        "last_name": last,
        "country": random.choice(tuple(COUNTRIES)).removeprefix("the "),
        "birth_year": random.randint(1940, 2010),
    }
    common = ["name", "age", "city", "job", "email"]
    keys = random.sample(common if random.random() < 0.6 else list(field), random.randint(1, 4))
    said = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]
    value = {key: field[key] for key in keys}

    def judge(text: str) -> bool:
        try:
            got = json.loads(text)
        except ValueError:
            return False
        return isinstance(got, dict) and {k: type(v) for k, v in got.items()} == {
            k: type(value[k]) for k in keys
        }

    return turn(
        "json", request(random, _ASKS["invent"].pick(random, held, k=said)), _json(value), judge
    )


def sum_record(random: Random, held: bool) -> Example:
    a, b = operands(random, "plus", held)
    value = {"a": a, "b": b, "sum": worked("plus", a, b)}
    return turn(
        "json",
        request(random, _ASKS["sum"].pick(random, held, a=a, b=b)),
        _json(value),
        same_json(value),
    )


def array(random: Random, held: bool) -> Example:
    kind = random.choice(tuple(KINDS))
    at = random.randrange(4)
    value = run(random, KINDS[kind], at + 2)
    asked = request(
        random, _ASKS["list"].pick(random, held, n=random.choice((NUMBERS[at], at + 2)), x=kind)
    )

    def judge(text: str) -> bool:
        try:
            got = json.loads(text)
        except ValueError:
            return False
        return isinstance(got, list) and len(got) == at + 2 and set(got) <= set(KINDS[kind])

    return turn("json", asked, _json(value), judge)


def pairs(random: Random, held: bool) -> Example:
    value: dict[str, Any] = {}
    for _ in range(random.randint(1, 3)):
        key = random.choice(
            (
                made_up_word(random),
                *[
                    "x",
                    "y",
                    "title",
                    "status",
                    "size",
                    "code",
                    "kind",
                    "count",
                    "level",
                    "user",
                    "mode",
                ],
            )
        )
        value[key] = random.choice(
            (
                random.randint(0, 999),
                made_up_word(random),
                random.choice(COLOURS),
                random.random() < 0.5,
            )
        )
    link = random.choice((" = ", ": ", " is ", " set to "))
    said = random.choice((", ", " and ")).join(
        f"{key}{link}{_json(item) if not isinstance(item, str) else item}"
        for key, item in value.items()
    )
    return turn(
        "json",
        request(random, _ASKS["pairs"].pick(random, held, p=said)),
        _json(value),
        same_json(value),
    )


def event(random: Random, held: bool) -> Example:
    a, b = random.sample(split(NAMES, held), 2)
    name, day = random.choice(_POOLS["events"]), random.choice(DAYS)
    value = {"name": name, "date": day, "participants": [a, b]}
    order = request(random, _ASKS["event_asks"].pick(random, held))
    said = _ASKS["event_says"].pick(random, held, a=a, b=b, e=name, d=day)
    said = said[:1].upper() + said[1:] + "."
    judge: Judge = same_json(value)
    if random.random() < 0.5:
        return Example("json", [system(order), user(said), assistant(_json(value))], judge)
    return turn("json", f"{order.rstrip('.!?')}: {said}", _json(value), judge)


def records(random: Random, held: bool) -> Example:
    skills = (country, person, person, invented, invented, sum_record, array, pairs, event)
    return random.choice(skills)(random, held)
