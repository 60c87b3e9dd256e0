"""Seconds of decisions: 1, 8, 64 and 400 questions about an input of about 2,000 tokens.

Each round asks about a new input (cold), and then the same again (warm). Questions are predicates,
choices of 4 and scores of 5 levels in turn, in System One's form, which llama-server and vLLM also
serve: `--url` measures a server that runs, in turn with Podway. Podway's rows also have iterations
and computed tokens, from its /metrics.

    python -m examples.benchmarks.server.decisions CHECKPOINT [--flags "--weights int8"]
        [--url NAME=URL …] [--questions 1,8,64,400] [--words 1600] [--rounds 3] [--json FILE]
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from examples.benchmarks.server.served import gauges, serving

WORDS = (
    "order", "parcel", "refund", "customer", "letter", "water", "garden", "engine", "paper",
    "number", "street", "winter", "light", "message", "school", "market", "doctor", "window",
    "train", "music", "answer", "kitchen", "river", "metal", "cloud", "color",
)  # fmt: skip
COUNTERS = {"iterations": "podway_iterations_total", "computed": "podway_iteration_tokens_sum"}


def text_of(words: int, seed: int) -> str:
    """A text that no other seed begins with."""
    chance = random.Random(seed)
    return " ".join([f"Case {seed}.", *chance.choices(WORDS, k=words)])


def questions_of(count: int) -> dict[str, Any]:
    """Questions of all types in turn."""
    kinds = (
        lambda n: {"type": "noul", "instructions": f"The text is about {WORDS[n % 26]} {n}."},
        lambda n: {
            "type": "choice",
            "instructions": f"Who should answer request number {n}?",
            "criteria": {"sales": "offers", "support": "faults", "billing": "money", "other": None},
        },
        lambda n: {
            "type": "score",
            "instructions": f"How urgent is point {n} of the text?",
            "criteria": ["never", "this month", "this week", "today", "at once"],
        },
    )
    return {f"q{n}": kinds[n % 3](n) for n in range(count)}


async def seconds_of(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """The time of one request, whose answers are all there."""
    began = time.perf_counter()
    async with session.post(f"{url}/v1/systemone", json=body) as response:
        answer = await response.json()
    seconds = time.perf_counter() - began
    if response.status != 200 or len(answer["answers"]) != len(body["questions"]):
        raise SystemExit(f"{url}: {response.status} {str(answer)[:300]}")
    return seconds


async def one_round(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], *, is_podway: bool
) -> dict[str, float]:
    """Seconds of a new input and of the same again; of Podway also what the first one took."""
    before = await gauges(session, url) if is_podway else {}
    cold = await seconds_of(session, url, body)
    after = await gauges(session, url) if is_podway else {}
    counted = {name: after[key] - before[key] for name, key in COUNTERS.items() if is_podway}
    return {"cold": cold, "warm": await seconds_of(session, url, body), **counted}


async def measure(urls: dict[str, str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each server and number of questions: medians of all rounds."""
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for number in range(options.rounds + 1):  # the first one warms up
            for count in options.questions:
                body = {
                    "state": text_of(options.words, 1000 * count + number),
                    "questions": questions_of(count),
                }
                for name, url in urls.items():
                    is_podway = name == "podway"
                    named = body | {"model": options.model}
                    found = await one_round(session, url, named, is_podway=is_podway)
                    if number:
                        rounds.setdefault((name, count), []).append(found)
    return [
        {"server": name, "questions": count}
        | {key: median([one[key] for one in found]) for key in found[0]}
        for (name, count), found in rounds.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a page has them."""
    lines = [
        "| server | questions | new input (s) | again (s) | ms per question | steps | tokens |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in sorted(rows, key=lambda row: (row["questions"], row["server"])):
        each = 1000 * row["cold"] / row["questions"]
        counted = [f"{row[name]:.0f}" if name in row else "" for name in COUNTERS]
        lines.append(
            f"| {row['server']} | {row['questions']} | {row['cold']:.3f} | {row['warm']:.3f} | "
            f"{each:.1f} | {' | '.join(counted)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--model", default="m", help="the name of the model on all servers")
    parser.add_argument("--flags", default="", help="of podway serve")
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--questions", default="1,8,64,400")
    parser.add_argument("--words", type=int, default=1600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.questions = [int(each) for each in options.questions.split(",")]
    with ExitStack() as stack:
        flags = [options.checkpoint, "--served-model-name", options.model, *options.flags.split()]
        _, url = stack.enter_context(serving(flags))
        peers = dict(each.split("=", 1) for each in options.url)
        rows = asyncio.run(measure({"podway": url, **peers}, options))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
