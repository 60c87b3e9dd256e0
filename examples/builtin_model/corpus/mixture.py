"""The share of each skill, and its context: system messages and tools that do not fit."""

from dataclasses import replace
from random import Random

from examples.builtin_model.corpus.dialogues import dialogues
from examples.builtin_model.corpus.example import Example, Skill, system
from examples.builtin_model.corpus.facts import facts
from examples.builtin_model.corpus.lists import counting, listing, repeating
from examples.builtin_model.corpus.manners import PLAIN, manners
from examples.builtin_model.corpus.podway import about_podway, terms
from examples.builtin_model.corpus.poems import poem
from examples.builtin_model.corpus.records import records
from examples.builtin_model.corpus.stories import another_story, story
from examples.builtin_model.corpus.sums import several_sums, sums
from examples.builtin_model.corpus.talk import small_talk, unknown
from examples.builtin_model.corpus.tool_kinds import KINDS
from examples.builtin_model.corpus.tools import calling, offers, reporting, schema


def resisting(random: Random, held: bool) -> Example:
    """Tools are offered, but the question fits none of them: a plain answer."""
    skills = (facts, small_talk, about_podway, terms, story, facts)
    inner = random.choice(skills)(random, held)
    fitting = [KINDS["search"], KINDS["weather"], KINDS["time"], KINDS["date"]]
    while True:
        offered = offers(random, held, random.choice((1, 1, 2)))
        if not any(each.kind in fitting for each in offered):
            tools = [schema(random, each) for each in offered]
            return replace(inner, domain="tools: none fits", tools=tools)


# skill -> share of the examples early, when copying and sums are learned, and later
SKILLS: dict[Skill, tuple[float, float]] = {
    about_podway: (4, 7),
    terms: (4, 7),
    small_talk: (5, 7),
    unknown: (5, 8),
    facts: (8, 13),
    sums: (24, 26),
    several_sums: (8, 8),
    story: (1, 4),
    another_story: (0, 0.3),
    poem: (0.5, 1),
    counting: (2, 4),
    listing: (2, 3),
    repeating: (22, 8),
    records: (12, 10),
    calling: (0, 5),
    reporting: (0, 3.5),
    resisting: (0, 1.5),
    dialogues: (4, 8),
    manners: (4, 4),
}
SYSTEM_SHARE = 0.3


def dressed(random: Random, example: Example) -> Example:
    """Adds, sometimes, a system message without effect."""
    if example.messages[0]["role"] == "system" or random.random() > SYSTEM_SHARE:
        return example
    return replace(example, messages=[system(random.choice(PLAIN)), *example.messages])


def draw(random: Random, early: bool) -> Example:
    shares = [first if early else then for first, then in SKILLS.values()]
    (skill,) = random.choices(list(SKILLS), shares)
    return dressed(random, skill(random, False))


def examination(random: Random, skill: Skill) -> Example:
    return dressed(random, skill(random, True))
