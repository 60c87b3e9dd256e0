"""The size of the house in figures: `python -m tests.house_table [DIRECTORY]` prints a table.

The lines that `tests/test_house.py` bounds room by room are summed here, beside what no test
bounds: features that run through many files, and numbers without a sweep.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PRODUCT = ("adapters", "engine", "gateway")
AREAS = {
    "engine: words, loop, streams, transport": ("engine", "engine/transport"),
    "engine: control, KV, policy, cost, speculation": (
        "engine/control", "engine/kv", "engine/policy", "engine/cost", "engine/speculation",
    ),
    "engine: simulated; research": ("engine/simulated", "engine/research"),
    "worker: pipeline, model, sampling, weights, LoRA, ports": (
        "engine/worker", "engine/worker/lora", "engine/worker/model", "engine/worker/ports",
        "engine/worker/process", "engine/worker/sampling", "engine/worker/weights",
    ),
    "worker: CPU": ("engine/worker/cpu",),
    "worker: CUDA, with FlashInfer": ("engine/worker/cuda", "adapters/attention/flashinfer"),
    "gateway": ("gateway",),
    "adapters without FlashInfer": ("adapters",),
}  # fmt: skip
FEATURES = {
    "recurrent states": r"recurrent|RecurrentState",
    "LoRA": r"(?i)lora",
    "pooling": r"(?i)pooling",
    "background requests": r"is_background|[Bb]ackground",
}
NUMBER = re.compile(r"^_?[A-Z][A-Z_0-9]*(?:, _?[A-Z_0-9]+)*(?:: \w+)? = -?\(?[\d.][^\n]*")
SWEEPS = "examples/benchmarks/results/constants/constants.json"
MAX_LINES, MAX_METHODS, MAX_FIELDS = 60, 20, 25
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
ALL, FILES, CLASSES = "lines of all source", "files", "classes"
LARGE_CLASSES = f"classes of more than {MAX_METHODS} methods or {MAX_FIELDS} fields"
LONG_FUNCTIONS = f"functions of more than {MAX_LINES} lines"
NUMBERS = "numbers at the top of modules"
CONTROL = "of them in control, KV, policy, cost, speculation"
SWEPT = "of these with a sweep"
FIXED = "of these fixed by a format, a unit or a contract"


def sources(root: Path, folders: tuple[str, ...] = PRODUCT) -> Iterator[Path]:
    """The Python files below the folders."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            if "node_modules" not in path.parts:
                yield path


@cache
def definitions(path: Path) -> tuple[Definition, ...]:
    """The classes and functions of a file."""
    return tuple(_definitions_in(ast.parse(path.read_text())))


def _definitions_in(node: ast.AST) -> Iterator[Definition]:
    """Those of a node's statements; expressions, which have none, are not walked."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, Definition):
            yield each
        if isinstance(each, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _definitions_in(each)


def area_of(name: str) -> str:
    """The area whose longest folder holds the file."""
    rooms = [(room, area) for area, rooms in AREAS.items() for room in rooms]
    return max((room, area) for room, area in rooms if name.startswith(f"{room}/"))[1]


@cache
def swept(root: Path) -> frozenset[str]:
    """The numbers that the sweep varies."""
    return frozenset(row["constant"] for row in json.loads((root / SWEEPS).read_text()))


class Number(NamedTuple):
    """A number at the top of a module of the control plane, or several in one line: `module` is
    below `engine`, and `why` the comments behind it and above it, or above the lines before it."""

    module: str
    names: tuple[str, ...]
    why: str

    def is_swept(self, root: Path) -> bool:
        """Whether rows of the sweep vary it, or its comment names a page of results with it."""
        pages = re.findall(r"results/(\w+)", self.why)
        if pages != ["constants"] * len(pages) or not pages:
            return bool(pages)
        return {f"{self.module}.{name}" for name in self.names} <= swept(root)

    @property
    def is_fixed(self) -> bool:
        """Whether its comment says why it is no matter of tuning, as `fixed: REASON`."""
        return "fixed: " in self.why


def numbers(root: Path) -> Iterator[Number]:
    """The numbers of the control plane."""
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        if not area_of(name).startswith("engine: control"):
            continue
        module = name.removeprefix("engine/").removesuffix(".py").replace("/", ".")
        comment, is_open = "", False  # of the lines above, which a blank line ends
        for line in path.read_text().splitlines():
            if line.startswith("#"):
                comment, is_open = f"{comment if is_open else ''} {line}", True
                continue
            is_open = False
            found = NUMBER.match(line)
            if found is None:
                comment = ""
                continue
            names, _, own = line.partition(" = ")
            own = own.partition("#")[2]
            why = own if "fixed: " in own or "results/" in own else f"{comment} {own}"
            yield Number(module, tuple(names.partition(":")[0].split(", ")), why)


def figures(root: Path) -> dict[str, int]:
    """All rows of the table by name."""
    found = {ALL: 0, **dict.fromkeys(AREAS, 0)}
    found |= dict.fromkeys(
        (FILES, CLASSES, LARGE_CLASSES, LONG_FUNCTIONS, NUMBERS, CONTROL, SWEPT, FIXED), 0
    )
    found |= {f"files that name {feature}": 0 for feature in FEATURES}
    for path in sources(root):
        text, name = path.read_text(), path.relative_to(root).as_posix()
        lines = len(text.splitlines())
        found[ALL] += lines
        found[area_of(name)] += lines
        found[FILES] += 1
        for feature, pattern in FEATURES.items():
            found[f"files that name {feature}"] += bool(re.search(pattern, text))
        found[NUMBERS] += sum(bool(NUMBER.match(line)) for line in text.splitlines())
        for node in definitions(path):
            if isinstance(node, ast.ClassDef):
                found[CLASSES] += 1
                found[LARGE_CLASSES] += is_large(node)
            else:
                lines = (node.end_lineno or 0) - node.lineno + 1
                found[LONG_FUNCTIONS] += lines > MAX_LINES
    for number in numbers(root):
        found[CONTROL] += 1
        found[SWEPT] += number.is_swept(root)
        found[FIXED] += number.is_fixed
    return found


def is_large(node: Definition) -> bool:
    """Whether a class has more methods or fields than one can hold."""
    if not isinstance(node, ast.ClassDef):
        return False
    methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
    fields = sum(isinstance(each, ast.AnnAssign) for each in node.body)
    return methods > MAX_METHODS or fields > MAX_FIELDS


if __name__ == "__main__":
    for row, count in figures(Path(sys.argv[1] if len(sys.argv) > 1 else ".")).items():
        sys.stdout.write(f"| {row} | {count:,} |\n")
