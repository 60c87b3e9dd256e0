"""Seconds of decisions: 1, 8, 64 and 400 questions about an input of about 2,000 tokens.

Each round asks about a new input (cold), and then the same again (warm). Questions are predicates,
choices of 4 and scores of 5 levels in turn, in one request in System One's form. `--servers` starts
others, from a TOML file, that have no decisions: there each question is a completion of one token
with its ten most likely ones, all sent at once with the input before the question. Podway's rows
also have iterations and computed tokens, from its /metrics. A first round warms up, and is not
counted; with `--once` there is neither that nor the warm half. Rows of other runs stay in DIR.

    python -m examples.benchmarks.server.decisions CHECKPOINT [--flags "--weights int8"]
        [--servers FILE [--only NAME …]] [--questions 1,8,64,400] [--once] [--words 1600]
        [--rounds 3] [--out DIR]
"""

import argparse
import asyncio
import json
import random
import time
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from examples.benchmarks.peers.servers import read_servers, running
from examples.benchmarks.server.served import gauges, serving
from examples.benchmarks.written import write_results

WORDS = (
    "order", "parcel", "refund", "customer", "letter", "water", "garden", "engine", "paper",
    "number", "street", "winter", "light", "message", "school", "market", "doctor", "window",
    "train", "music", "answer", "kitchen", "river", "metal", "cloud", "color",
)  # fmt: skip
COUNTERS = {"iterations": "podway_iterations_total", "computed": "podway_iteration_tokens_sum"}
AGAIN = "computed_again"  # tokens


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


def prompts_of(body: dict[str, Any]) -> list[str]:
    """The input, and behind it a question with its options; one text for each question."""
    return [
        f"{body['state']}\n\n{one['instructions']}\n{json.dumps(one.get('criteria'))}\nAnswer: "
        for one in body["questions"].values()
    ]


async def seconds_of_completions(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> float:
    """The time until all questions have their token, each in a request of its own. (llama-server
    has no log-probabilities of a token that is a part of a character.)"""

    async def ask(prompt: str) -> None:
        fields = {"model": body["model"], "prompt": prompt, "max_tokens": 1, "logprobs": 10}
        async with session.post(f"{url}/v1/completions", json=fields) as response:
            answer = await response.json()
        if response.status != 200 or "logprobs" not in answer["choices"][0]:
            raise SystemExit(f"{url}: {response.status} {str(answer)[:300]}")

    began = time.perf_counter()
    await asyncio.gather(*map(ask, prompts_of(body)))
    return time.perf_counter() - began


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
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    is_podway: bool,
    is_once: bool,
) -> dict[str, float]:
    """Seconds of a new input, and of the same again unless `is_once`; of Podway also what the first
    one took."""
    seconds = seconds_of if is_podway else seconds_of_completions
    before = await gauges(session, url) if is_podway else {}
    cold = await seconds(session, url, body)
    after = await gauges(session, url) if is_podway else {}
    counted = {name: after[key] - before[key] for name, key in COUNTERS.items() if is_podway}
    if is_once:
        return {"cold": cold, **counted}
    warm = await seconds(session, url, body)
    if is_podway:
        counted[AGAIN] = (await gauges(session, url))[COUNTERS["computed"]] - after[
            COUNTERS["computed"]
        ]
    return {"cold": cold, "warm": warm, **counted}


async def measure(urls: dict[str, str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each server and number of questions: medians of all rounds."""
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {}
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        for number in range(options.once, options.rounds + 1):  # number 0 warms up
            for count in options.questions:
                body = {
                    "state": text_of(options.words, 1000 * count + number),
                    "questions": questions_of(count),
                }
                for name, url in urls.items():
                    is_podway = name == "Podway"
                    named = body | {"model": options.model}
                    found = await one_round(
                        session, url, named, is_podway=is_podway, is_once=options.once
                    )
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
        "| server | questions | new input (s) | again (s) | ms per question | steps | tokens "
        "| tokens again |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in sorted(rows, key=lambda row: (row["questions"], row["server"])):
        each = 1000 * row["cold"] / row["questions"]
        counted = [f"{row[name]:.0f}" if name in row else "" for name in (*COUNTERS, AGAIN)]
        again = f"{row['warm']:.3f}" if "warm" in row else ""
        lines.append(
            f"| {row['server']} | {row['questions']} | {row['cold']:.3f} | {again} | "
            f"{each:.1f} | {' | '.join(counted)} |"
        )
    return "\n".join(lines)


def page(found: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown; the first row says what was measured."""
    about, *rows = found
    return f"""\
# Decisions about one input

`python -m examples.benchmarks.server.decisions`: seconds until 1 to 400 questions about an input of
about 2,000 tokens are answered, medians over {about["rounds"]} round(s) in turn
([JSON](decisions.json)). {about["about"]}.

*Again*: the same questions once more, with the prefix caches warm.
Rows without it were asked once, with no round before.
Podway gets all questions in one request to `/v1/systemone`. The other servers have no such
endpoint: there each question is a completion of one token with its ten most likely ones, all sent
at once.

{table(rows)}

Steps and tokens are Podway's iterations and the tokens they computed: the input once, and the
questions behind it together. Asked again, it computes of each question what is behind its last
whole block of 16 tokens (*tokens again*, where they were counted); llama-server computes one token
of each, since a slot keeps all its tokens. That is why llama-server leads with one and with eight
questions asked again, as long as it has a slot for each.
"""


def others(directory: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that the directory has and that are not measured anew."""
    path, fresh = (
        directory / f"{directory.name}.json",
        {(row["server"], row["questions"]) for row in rows},
    )
    kept = json.loads(path.read_text())[1:] if path.exists() else []
    return [row for row in kept if (row["server"], row["questions"]) not in fresh]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--model", default="m", help="the name of the model on all servers")
    parser.add_argument("--flags", default="", help="of podway serve")
    parser.add_argument("--servers", type=Path, help="a TOML file of others, which are started")
    parser.add_argument("--only", nargs="+", help="the names of those that are")
    parser.add_argument("--once", action="store_true", help="no round before, and not again")
    parser.add_argument("--questions", default="1,8,64,400")
    parser.add_argument("--words", type=int, default=1600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--about", default="", help="the checkpoint and the machine, for the page")
    parser.add_argument("--out", type=Path, help="directory of the results")
    options = parser.parse_args()
    options.questions = [int(each) for each in options.questions.split(",")]
    with ExitStack() as stack:
        flags = [options.checkpoint, "--served-model-name", options.model, *options.flags.split()]
        _, url = stack.enter_context(serving(flags))
        urls = {"Podway": url}
        tables = tomllib.loads(options.servers.read_text()) if options.servers else {"server": []}
        for server in read_servers(tables):
            if not options.only or server.name in options.only:
                urls[server.name] = stack.enter_context(running(server)).url
        rows = asyncio.run(measure(urls, options))
    print(table(rows))
    if options.out:
        about = {"about": options.about, "rounds": options.rounds}
        write_results(options.out, [about, *others(options.out, rows), *rows], page)


if __name__ == "__main__":
    main()
