"""Skill: greetings, small talk, and stating what the model does not know."""

from random import Random

from examples.builtin_model.corpus.example import Example, containing, exactly, turn
from examples.builtin_model.corpus.facts import COUNTRIES
from examples.builtin_model.corpus.phrasing import (
    capital,
    made_up_name,
    made_up_word,
    question,
    request,
    split,
)
from examples.builtin_model.corpus.text_pools import asks, items, pools
from examples.builtin_model.corpus.words import ACTIVITIES, CITIES, PEOPLE, TOPICS

UNKNOWN = "I am a small demonstration model and don't know that."
HINT = f"{UNKNOWN} Ask me about Podway, small sums, a few facts, or for a short story."

_POOLS = pools("talk")
_UNKNOWN = asks(_POOLS)["unknown"]
_ITEMS = items(_POOLS)


def small_talk(random: Random, held: bool) -> Example:
    item = random.choice(_ITEMS)
    text = item.asks.pick(random, held)
    if not held and random.random() < 0.3:
        bare = text.rstrip("?!.")
        text = random.choice((text.lower(), bare, f"{bare}!", text))
    return turn("talk", text, random.choice(item.answers), exactly(*item.answers))


def unknown(random: Random, held: bool) -> Example:
    topics = split(TOPICS, held)
    stranger = f"{made_up_name(random)} {made_up_name(random)}"
    fields: dict[str, object] = {
        "topic": random.choice(topics),
        "other": random.choice(topics),
        "person": random.choice([*split(PEOPLE, held), stranger]),
        "do": random.choice(split(ACTIVITIES, held)),
        "place": random.choice([*CITIES, *COUNTRIES]),
        "word": made_up_word(random),
        "word2": made_up_word(random),
        "word3": made_up_word(random),
        "name": made_up_name(random),
        "nowhere": capital(made_up_word(random)) + random.choice(("ia", "land", "istan", "")),
        "language": random.choice(_POOLS["languages"]),
        "event": random.choice(_POOLS["events"]),
        "year": random.randint(1000, 2030),
        "big": random.randint(120, 9999),
        "big2": random.randint(11, 999),
    }
    text = _UNKNOWN.pick(random, held, **fields)
    starts = ("what", "who", "how", "why", "when", "is", "are", "do", "should", "where", "can")
    asked = question if text.startswith(starts) else request
    answer = HINT if random.random() < 0.5 else UNKNOWN
    return turn("unknown", asked(random, text, slips=0.03), answer, containing(UNKNOWN))
