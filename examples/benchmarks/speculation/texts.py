"""The texts of `examples.benchmarks.speculation.engines`: requests, and predictions for them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import adapters
from adapters.tokenizers import load_token_table
from engine.grammar import TokenTable
from engine.request import RequestSpec
from engine.step import SamplingParams
from examples.benchmarks.speculation.draft_checkpoints import VOCAB

BUILTIN = str(Path(adapters.__file__).parent / "builtin")
OFF = "off"  # a second engine without speculation
TEXTS = {
    "edit": (OFF, "prediction"),
    "again": (OFF, "suffix"),
    "loops": (OFF, "ngram", "suffix"),
    "stories": (OFF, "ngram", "suffix", "prediction"),
    "hostile": (OFF, "ngram", "prediction"),
    "layers": (OFF, "draft_model"),
    "unlike": (OFF, "draft_model"),
}
WITH_DRAFT_MODEL = ("layers", "unlike")
OF_BUILTIN = ("loops", "stories")
NAMES = ("Tom", "Lily", "Max", "Anna", "Ben", "Mia", "Sam", "Lucy")
PROMPT_LEN, OUTPUT_LEN = 16, 64
EDIT_EVERY = 20  # tokens


def specs_of(text: str, count: int, number: int = 0) -> list[RequestSpec]:
    """`count` requests of round `number` of a text, without predictions."""
    first = 0 if text == "again" else count * number
    seeds = range(first, first + count)
    if text in OF_BUILTIN:
        table = load_token_table(Path(BUILTIN))
        prompts = [_builtin_prompt(table, text, seed) for seed in seeds]
    else:
        random = Random(first + 1)
        vocab_size = VOCAB if text in WITH_DRAFT_MODEL else 30_000
        prompts = [tuple(random.choices(range(vocab_size), k=PROMPT_LEN)) for _ in seeds]
    temperature = 0.0 if text == "loops" else 1.0
    return [
        RequestSpec(prompt, OUTPUT_LEN, SamplingParams(temperature=temperature, seed=seed))
        for seed, prompt in zip(seeds, prompts, strict=True)
    ]


def _builtin_prompt(table: TokenTable, text: str, number: int) -> tuple[int, ...]:
    """A prompt for the built-in model: a chat message for stories, else text that it continues."""
    if text == "loops":
        return tuple(table.encode(f"{NAMES[number % len(NAMES)]} said {number}"))
    begin, end = table.special["<|im_start|>"], table.special["<|im_end|>"]
    asked = f"user\nWrite a story about {NAMES[number % len(NAMES)]}, who is {number}."
    line = table.encode("\n")
    return (begin, *table.encode(asked), end, *line, begin, *table.encode("assistant\n"))


def edited(output: Sequence[int], random: Random) -> tuple[int, ...]:
    """The output with about one token in `EDIT_EVERY` replaced, removed or inserted."""
    found: list[int] = []
    for token in output:
        kind = random.randrange(3 * EDIT_EVERY)
        if kind != 0:
            found.append(token if kind != 1 else random.randrange(30_000))
        if kind == 2:
            found.append(random.randrange(30_000))
    return tuple(found)


def predicted(
    text: str, specs: Sequence[RequestSpec], outputs: Sequence[Sequence[int]]
) -> list[RequestSpec]:
    """The requests with predictions: their edited `outputs`, or text unrelated to them."""
    random, found = Random(1), []
    for spec, output in zip(specs, outputs, strict=True):
        other = tuple(random.choices(range(2_000 if text == "stories" else 30_000), k=OUTPUT_LEN))
        prediction = edited(output, random) if text == "edit" else other
        found.append(replace(spec, prediction=prediction))
    return found
