"""Evaluates the built-in model on phrasings, sums and names that its training never used.

    python -m examples.builtin_model.evaluate --model adapters/builtin
    python -m examples.builtin_model.evaluate --url http://127.0.0.1:8000

Greedy either way, so a server that computes rightly gets the score that `transformers` gets.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from random import Random

from examples.builtin_model.corpus.example import Example
from examples.builtin_model.corpus.mixture import SKILLS, examination
from examples.builtin_model.training.answering import Answerer, LocalModel, Server
from examples.builtin_model.training.card import with_scores
from examples.builtin_model.training.chat_template import said


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", type=Path, help="a checkpoint directory, run with transformers")
    where.add_argument("--url", help="an OpenAI-compatible server, such as http://127.0.0.1:8000")
    parser.add_argument("--each", type=int, default=60, help="examples of each skill")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to show of each domain")
    parser.add_argument("--card", type=Path, help="write the scores into this model card")
    return parser.parse_args()


def papers(seed: int, each: int) -> list[Example]:
    """The questions, which depend on the seed only."""
    random = Random(seed)
    return [examination(random, skill) for skill in SKILLS for _ in range(each)]


def table(right: dict[str, int], asked: dict[str, int]) -> str:
    lines = [f"{'domain':18} {'right':>6} {'of':>6} {'score':>8}"]
    for domain in sorted(asked):
        share = right[domain] / asked[domain]
        lines.append(f"{domain:18} {right[domain]:6} {asked[domain]:6} {share:8.1%}")
    total, most = sum(right.values()), sum(asked.values())
    lines.append(f"{'overall':18} {total:6} {most:6} {total / most:8.1%}")
    return "\n".join(lines)


def main() -> None:
    options = parse()
    source: Answerer = Server(options.url) if options.url else LocalModel(options.model)
    examples = papers(options.seed, options.each)
    answers = source.answer(examples, options.max_tokens)
    right: dict[str, int] = defaultdict(int)
    asked: dict[str, int] = defaultdict(int)
    shown: dict[str, int] = defaultdict(int)
    for example, answer in zip(examples, answers, strict=True):
        domain = example.domain
        asked[domain] += 1
        good = example.judge(answer)
        right[domain] += good
        if not good and shown[domain] < options.show:
            shown[domain] += 1
            question = example.messages[-2]["content"]
            wanted = said(example.messages[-1])
            sys.stdout.write(f"[{domain}] {question!r}\n  wanted {wanted!r}\n  got    {answer!r}\n")
    sys.stdout.write(table(right, asked) + "\n")
    if options.card:
        scores = {domain: (right[domain], asked[domain]) for domain in sorted(asked)}
        options.card.write_text(with_scores(options.card.read_text(), scores))


if __name__ == "__main__":
    main()
