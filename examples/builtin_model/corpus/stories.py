"""Skill: short stories with the hero and place that the user names."""

from random import Random

from examples.builtin_model.corpus.example import Example, Judge, assistant, turn, user
from examples.builtin_model.corpus.phrasing import (
    capital,
    made_up_name,
    request,
    split,
    with_article,
)
from examples.builtin_model.corpus.text_pools import asks, pools
from examples.builtin_model.corpus.words import HEROES, NAMES, PLACES

_POOLS = pools("stories")
_ASKS = asks(_POOLS)


def tell(random: Random, hero: str, name: str, place: str, chapters: int = 1) -> str:
    """The first sentence names hero, name and place; then want, trouble, help, end, moral."""
    trait = random.choice(_POOLS["traits"])
    described = f"{with_article(trait)} {hero}"
    goal, found = random.choice(_POOLS["goals"])
    helper = "an old " + random.choice([word for word in HEROES[:58] if word != hero])
    words = {
        "name": name, "place": place, "helper": helper, "Helper": capital(helper), "goal": found,
    }  # fmt: skip
    openings = (
        f"Once upon a time, there was {described} named {name} who lived in {place}.",
        f"In {place} lived {with_article(hero)} named {name}. {name} was very {trait}.",
        f"Long ago, {described} called {name} lived in {place}.",
    )
    lines = [random.choice(openings)]
    lines += random.sample(_POOLS["extras"], random.randint(0, 2))
    lines.append(f"{name} {goal}.")
    lines += [
        random.choice(_POOLS["troubles"]),
        random.choice(_POOLS["helps"]),
        random.choice(_POOLS["ends"]),
    ]
    text = " ".join(lines).format(**words)
    for _ in range(chapters - 1):
        middle = [
            random.choice(_POOLS["later"]),
            *random.sample(_POOLS["extras"], 1),
            random.choice(_POOLS["troubles"]),
        ]
        middle += [random.choice(_POOLS["helps"]), random.choice(_POOLS["ends"])]
        text += "\n\n" + " ".join(middle).format(**words)
    moral = random.choice(_POOLS["morals"])
    return f"{text} {moral}".format(**words)


def _judge(*parts: str) -> Judge:
    def judge(text: str) -> bool:
        sentences = text.count(".") + text.count("!")
        return all(part in text for part in parts) and sentences >= 4 and text[-1:] in '."!'

    return judge


def story(random: Random, held: bool) -> Example:
    hero, name = random.choice(HEROES), random.choice([*NAMES, made_up_name(random)])
    place = random.choice(PLACES)
    if random.random() < 0.25:
        asked = request(random, _ASKS["open"].pick(random, held))
        return turn("stories", asked, tell(random, hero, name, place), _judge())
    hero = random.choice(split(HEROES, held, 10))
    about, wanted = with_article(hero), [hero]
    if random.random() < 0.2:
        about = f"the {hero}"
    if random.random() < 0.5:
        name = random.choice(split([*NAMES, made_up_name(random)], held, 10))
        about += random.choice((" named ", " called ", " with the name ")) + name
        wanted.append(name)
    if random.random() < 0.35:
        place = random.choice(split(PLACES, held, 10))
        about += random.choice((" in ", " who lives in ", " living in ")) + place
        wanted.append(place)
    asked = _ASKS["about"].pick(random, held, hero=about)
    chapters = random.choice((2, 3)) if "long" in asked else 1
    return turn(
        "stories",
        request(random, asked),
        tell(random, hero, name, place, chapters),
        _judge(*wanted),
    )


def another_story(random: Random, held: bool) -> Example:
    first = story(random, held)
    second = tell(random, random.choice(HEROES), random.choice(NAMES), random.choice(PLACES))
    messages = [
        *first.messages,
        user(random.choice(_POOLS["again_kept" if held else "again"])),
        assistant(second),
    ]
    return Example("stories", messages, _judge())
