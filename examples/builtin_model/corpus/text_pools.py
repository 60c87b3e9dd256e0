"""Reads the TOML files in `text/`: words, phrasings, facts, sentences."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Pools = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asks:
    """Phrasings of one question; the `kept` ones occur in the evaluation only."""

    taught: tuple[str, ...]
    kept: tuple[str, ...]

    def pick(self, random: Random, held: bool, **fields: object) -> str:
        text = random.choice(self.kept if held else self.taught)
        return text.format(**fields) if fields else text


@dataclass(frozen=True, slots=True)
class Item:
    """One question with its answers, of which any is right."""

    asks: Asks
    answers: tuple[str, ...]


def pools(name: str) -> Pools:
    path = Path(__file__).parent / "text" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def asks_in(table: Pools) -> Asks:
    return Asks(tuple(table["taught"]), tuple(table["kept"]))


def asks(source: Pools) -> dict[str, Asks]:
    return {name: asks_in(table) for name, table in source["asks"].items()}


def items(source: Pools) -> list[Item]:
    return [
        Item(asks_in(table), tuple(table.get("answers") or [table["answer"]]))
        for table in source["items"]
    ]
