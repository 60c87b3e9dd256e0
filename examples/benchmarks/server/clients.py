"""The page of `results/clients` from its JSON file: other projects' clients, and what failed.

    python -m examples.benchmarks.server.clients examples/benchmarks/results/clients

The rows of the file come from `client_calls.py`, `ai_sdk_calls.mjs` and the commands that it names.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

ABOUT = """# Other projects' clients

Written by `python -m examples.benchmarks.server.clients FOLDER` from [clients.json](clients.json),
which has each command. The newest version of every client that its package manager offered was
installed into a folder of its own and set up as a new user would. `builtin` is the built-in model,
greedy, with a context of {context:,} tokens; `scripted` is the gateway over a model that calls the
client's tool and ends after its result, as in `tests/clients`, because the built-in model calls an
agent's tools only by chance. An operation has passed if the client returned what it should have;
whether an answer of two million parameters makes sense does not count.

{note}

| client | version | model | operations tried | passed | what failed, and why |
|---|---|---|---|---|---|
"""


def page(found: Mapping[str, Any]) -> str:
    """The page of a file with `note`, `context` (tokens), `clients`, `repaired`, `not_tried`."""
    rows = [_row(client) for client in found["clients"]]
    tried = [each for client in found["clients"] for each in client["operations"]]
    total = f"\n{sum(each['passed'] for each in tried)} of {len(tried)} operations passed.\n"
    parts = [ABOUT.format(context=found["context"], note=found["note"]), *rows, total]
    for title, key in (("Repaired in this round", "repaired"), ("Not tried", "not_tried")):
        items = [f"- {name}: {why}\n" for name, why in found[key].items()]
        parts += [f"\n## {title}\n\n", *items]
    return "".join(parts)


def _row(client: Mapping[str, Any]) -> str:
    operations: Sequence[Mapping[str, Any]] = client["operations"]
    failed = [f"{each['name']}: {each['why']}" for each in operations if not each["passed"]]
    remark = [client["remark"]] if "remark" in client else []
    cells = (
        client["client"],
        client["version"],
        client["model"],
        _grouped([each["name"] for each in operations]),
        f"{len(operations) - len(failed)} of {len(operations)}",
        "; ".join([*failed, *remark]).replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |\n"


def _grouped(names: Sequence[str]) -> str:
    """The names, in which neighbours with the same text before a colon share it."""
    split = [name.rpartition(": ")[::2] for name in names]
    groups = [
        (start, [name for _, name in group]) for start, group in groupby(split, key=itemgetter(0))
    ]
    return "; ".join(
        f"{start}: {', '.join(found)}" if start else "; ".join(found) for start, found in groups
    )


def main() -> None:
    """Write the page beside its file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    found = json.loads((folder / "clients.json").read_text())
    (folder / "README.md").write_text(page(found))


if __name__ == "__main__":
    main()
