"""Variation of phrasings: openers, capitals, typing mistakes, made-up words."""

from collections.abc import Sequence
from random import Random

from examples.builtin_model.corpus.text_pools import pools

_POOLS = pools("phrasing")


def split(pool: Sequence[str], held: bool, every: int = 8) -> list[str]:
    """Every eighth word of a pool is held out for evaluation."""
    return [word for i, word in enumerate(pool) if (i % every == every - 1) == held]


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _slip(random: Random, text: str) -> str:
    """One typing mistake inside a word."""
    at = random.randrange(1, max(2, len(text) - 1))
    if not text[at - 1 : at + 1].isalpha():
        return text
    if random.random() < 0.5:
        return text[:at] + text[at + 1 :]
    return text[: at - 1] + text[at] + text[at - 1] + text[at + 1 :]


def question(random: Random, text: str, *, slips: float = 0.0) -> str:
    """A question as a user might type it."""
    if random.random() < 0.3:
        text = text.replace("what is ", "what's ").replace("who is ", "who's ")
    if random.random() < slips:
        text = _slip(random, text)
    if random.random() < 0.15:
        text = random.choice(_POOLS["question_openers"]) + text
    if random.random() < 0.75:
        text = capital(text)
    return text + random.choice(("?", "?", "?", "?", "", "", " ?"))


def request(random: Random, text: str, *, slips: float = 0.0) -> str:
    """A command as a user might type it."""
    end = random.choice((".", ".", ".", "", "", "!"))
    if random.random() < slips:
        text = _slip(random, text)
    if not text.startswith(tuple(_POOLS["not_orders"])) and random.random() < 0.35:
        opener = random.choice(_POOLS["request_openers"])
        text = opener + text
        if opener.startswith(("can", "could", "would")):
            end = random.choice(("?", "?", ""))
    elif random.random() < 0.1:
        end = random.choice((" please", ", please.", " please."))
    if random.random() < 0.75:
        text = capital(text)
    return text + end


def asked(random: Random, text: str, *, slips: float = 0.0) -> str:
    """A question or, after "!", a command."""
    if text.startswith("!"):
        return request(random, text[1:], slips=slips)
    return question(random, text, slips=slips)


def made_up_word(random: Random) -> str:
    """A made-up word: teaches copying letter by letter."""
    syllables = random.randint(1, 3)
    word = "".join(
        random.choice(_POOLS["onsets"]) + random.choice(_POOLS["vowels"]) for _ in range(syllables)
    )
    return word + str(random.choice(_POOLS["codas"]))


def made_up_name(random: Random) -> str:
    return capital(made_up_word(random))
