"""Skill: counting, listing, spelling out and repeating: longer outputs that are easy to check."""

from random import Random

from examples.builtin_model.corpus.example import Example, Judge, exactly, turn
from examples.builtin_model.corpus.phrasing import (
    capital,
    made_up_name,
    made_up_word,
    request,
    split,
)
from examples.builtin_model.corpus.text_pools import asks, pools
from examples.builtin_model.corpus.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    FOODS,
    FRUITS,
    INSTRUMENTS,
    JOBS,
    NAMES,
    SPORTS,
    TREES,
    VEGETABLES,
)

_POOLS = pools("lists")
_ASKS = asks(_POOLS)
KINDS = {
    "animals": ANIMALS, "colours": COLOURS, "colors": COLOURS, "fruits": FRUITS,
    "vegetables": VEGETABLES, "trees": TREES, "instruments": INSTRUMENTS, "sports": SPORTS,
    "jobs": JOBS, "foods": FOODS, "cities": CITIES, "names": NAMES,
}  # fmt: skip
NUMBERS: list[str] = _POOLS["numbers"]
_SCRIPTS = (  # emoticons, pictures, Han, Hiragana, Greek, Cyrillic, Latin with accents
    (0x1F600, 0x1F64F), (0x1F300, 0x1F3FF), (0x4E00, 0x4FFF), (0x3042, 0x3093), (0x3B1, 0x3C9),
    (0x430, 0x44F), (0xE0, 0xF6),
)  # fmt: skip


def _written(numbers: list[int], commas: bool) -> str:
    return (", " if commas else "\n").join(map(str, numbers))


def counting(random: Random, held: bool) -> Example:
    commas = random.random() < 0.35
    longest = random.choice((5, 8, 12, 12, 20, 20, 30, 30 if commas else 60))
    if random.random() < 0.4:
        a, b = 1, random.randint(2, longest)
        text = _ASKS["count_to"].pick(random, held, b=b)
    else:
        a = random.choice(
            (0, 1, 1, random.randint(2, 20), random.randint(2, 99), random.randint(100, 900))
        )
        b = a + random.randint(1, longest)
        if random.random() < 0.2:
            b = a + min(b - a, 20)
            text = _ASKS["count_down"].pick(random, held, a=a, b=b)
            numbers = list(range(b, a - 1, -1))
            text += random.choice(_POOLS["commas"]) if commas else ""
            return turn("lists", request(random, text), _written(numbers, commas))
        text = _ASKS["count"].pick(random, held, a=a, b=b)
    text += random.choice(_POOLS["commas"]) if commas else ""
    return turn("lists", request(random, text), _written(list(range(a, b + 1)), commas))


def _judge_list(pool: list[str], count: int) -> Judge:
    allowed = {capital(word) for word in pool}

    def judge(text: str) -> bool:
        items = [line.partition(". ")[2] for line in text.splitlines()]
        return len(items) == count and len(set(items)) == count and set(items) <= allowed

    return judge


def run(random: Random, pool: list[str], count: int) -> list[str]:
    """Consecutive items of the pool: only the first is random, and none occurs twice."""
    start = random.randrange(len(pool) - count + 1)
    return pool[start : start + count]


def listing(random: Random, held: bool) -> Example:
    kind = random.choice(tuple(KINDS))
    pool = KINDS[kind]
    at = random.randrange(len(NUMBERS))
    n = at + 2
    said = NUMBERS[at] if random.random() < 0.6 else str(n)
    items = run(random, pool, n)
    answer = "\n".join(f"{i}. {capital(item)}" for i, item in enumerate(items, 1))
    asked = request(random, _ASKS["name"].pick(random, held, n=said, x=kind))
    return turn("lists", asked, answer, _judge_list(pool, n))


def _foreign(random: Random) -> str:
    """Emoji and other scripts: characters that take several tokens to write."""
    pieces = [
        "".join(chr(random.randint(low, high)) for _ in range(random.randint(1, 3)))
        for low, high in random.choices(_SCRIPTS, k=random.randint(1, 3))
    ]
    pieces.insert(
        random.randrange(len(pieces) + 1),
        random.choice((*_POOLS["greetings"], made_up_word(random))),
    )
    return " ".join(pieces)


def repeating(random: Random, held: bool) -> Example:
    words = [
        random.choice(
            (
                *split(_POOLS["sentence_words"], held),
                made_up_word(random),
                made_up_name(random),
                str(random.randint(0, 999)),
            )
        )
        for _ in range(random.randint(1, 7))
    ]
    text = " ".join(words)
    if random.random() < 0.3:
        text = random.choice(
            (
                "this is a test",
                "hello world",
                "this is only a test",
                "hello",
                "ok",
                "yes",
                "hi there",
            )
        )
    if random.random() < 0.12:
        text = _foreign(random)
    text = capital(text) if random.random() < 0.5 else text
    text += random.choice(("", "", "!", "."))
    asked = _ASKS["say"].pick(random, held, x=text)
    asked = capital(asked) if random.random() < 0.7 else asked
    return turn("repeat", asked, text, exactly(text))
