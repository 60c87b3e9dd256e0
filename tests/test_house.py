"""The house stays small: lines per room, and the shape of classes, names and docstrings.

`tests/house.toml` has the budgets. Raising one is a commit of its own that says why; a room that
has shrunk by more than a twentieth lowers its budget, so that it is not filled again unnoticed.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house_table import (
    ALL,
    AREAS,
    PRODUCT,
    Definition,
    definitions,
    figures,
    is_large,
    numbers,
    sources,
)

ROOT = Path(__file__).parents[1]
ROOMS: dict[str, int] = tomllib.loads((ROOT / "tests/house.toml").read_text())["lines"]
SLACK = 0.05  # the share of its budget that a room may leave unused
MAX_FILE = 400
FRAGMENT = re.compile(r"(As|Of|By|From|Which|Those|At) ")  # the begin of no sentence of its own
MID_SENTENCE = re.compile(r"\S  # ((?:in|for|by|from|with) which|of|that|which|whose) ")
OTHER_WORDS = re.compile(r"\b(?:LEAST|MOST)_[A-Z_]+")  # the field says MIN_ and MAX_


def room_of(path: Path) -> str:
    """The longest room of `house.toml` that holds the file; "" if there is none."""
    name = path.relative_to(ROOT).as_posix()
    return max((room for room in ROOMS if name.startswith(f"{room}/")), key=len, default="")


@cache
def lines_by_room() -> dict[str, int]:
    """The lines of each room, without those of rooms inside it."""
    lines = dict.fromkeys(["", *ROOMS], 0)
    for path in sources(ROOT, (*PRODUCT, "tests", "examples")):
        lines[room_of(path)] += len(path.read_text().splitlines())
    return lines


def places() -> Iterator[tuple[str, Definition]]:
    """All classes and functions of the product, with their places."""
    for path in sources(ROOT):
        for node in definitions(path):
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_every_file_is_in_a_room() -> None:
    assert lines_by_room()[""] == 0


def test_the_table_of_sizes_has_every_line_in_one_area() -> None:
    found = figures(ROOT)
    assert sum(found[area] for area in AREAS) == found[ALL]


def test_a_number_of_the_control_plane_has_a_sweep_or_says_why_it_is_fixed() -> None:
    found = [*numbers(ROOT)]
    assert len(found) > 50
    bare = [each for each in found if not each.is_fixed and not each.is_swept(ROOT)]
    assert [f"{each.module}: {', '.join(each.names)}" for each in bare] == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_keeps_its_budget_of_lines(room: str) -> None:
    lines, budget = lines_by_room()[room], ROOMS[room]
    assert lines <= budget, f"{room} has {lines} lines: shorten it, or raise its budget and say why"
    assert lines >= budget * (1 - SLACK) - 20, f"{room} has {lines} lines: lower its budget"


def test_no_file_is_longer_than_it_can_be_read_at_once() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in sources(ROOT)}
    assert [str(path) for path, count in lines.items() if count > MAX_FILE] == []


def test_no_class_has_more_methods_or_fields_than_one_can_hold() -> None:
    assert [place for place, node in places() if is_large(node)] == []


def test_a_docstring_is_understood_without_its_signature() -> None:
    docs = ((place, ast.get_docstring(node) or "") for place, node in places())
    assert [place for place, text in docs if FRAGMENT.match(text)] == []


def test_no_comment_goes_on_with_the_code_before_it() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources(ROOT)
        for line in path.read_text().splitlines()
        if MID_SENTENCE.search(line)
    ]
    assert found == []


def test_limits_are_named_min_and_max() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(ROOT)
        for name in OTHER_WORDS.findall(path.read_text())
    }
    assert sorted(found) == []


def test_processes_do_not_import_from_the_working_directory() -> None:
    """`python -m` without `-P` puts the folder that a user is in before the installed packages."""
    lines = (line for path in sources(ROOT) for line in path.read_text().splitlines())
    starts = [line for line in lines if '"-m", ' in line]
    assert [line for line in starts if '"-P", "-m"' not in line and '"pip"' not in line] == []
