"""FlashInfer's own planner, which is C++ for the host, plans our mixed steps.

Its functions are compiled out of the installed header; skipped without FlashInfer or a compiler.
"""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from adapters.attention.flashinfer.tables import PageTables
from engine.worker.cuda.step.graphs import mixed_sizes
from engine.worker.model.layout import blank_layout, padded
from tests.adapters.attention.flashinfer_cases import Paged

HEADER = "data/include/flashinfer/attention/scheduler.cuh"
NAMES = ("PrefillBinarySearchKVChunkSize", "PrefillSplitQOKVIndptr")
BLOCKS = 2 * 132  # thread blocks that run at once on an H200
BEFORE = """
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <vector>
#define FLASHINFER_ERROR(line) throw std::runtime_error(line)
#define FLASHINFER_CHECK(is_met, ...) if (!(is_met)) throw std::runtime_error(#is_met)
template <typename A, typename B> auto ceil_div(A x, B y) { return (x + y - 1) / y; }
uint32_t FA2DetermineCtaTileQ(int64_t rows, uint32_t, uint32_t, uint32_t) {
  return rows > 64 ? 128 : rows > 16 ? 64 : 16;
}
"""
AFTER = """
int main() {
  int heads, kv_heads, size, page, window, disables, captured;
  while (std::cin >> heads >> kv_heads >> size >> page >> window >> disables >> captured) {
    std::vector<int> rows(size + 1), pages(size + 1);
    for (int& each : rows) std::cin >> each;
    for (int& each : pages) std::cin >> each;
    auto found = PrefillSplitQOKVIndptr<int>(
        rows.data(), pages.data(), size, size, heads, kv_heads, 128, page, BLOCKS / kv_heads,
        captured, window, -1, disables, 0, 128, 2);
    std::cout << std::get<0>(found) << " " << std::get<1>(found) << " " << std::get<2>(found)
              << " " << std::get<3>(found) << " " << std::get<9>(found).back() << " "
              << std::get<4>(found) << std::endl;
  }
}
"""

Plans = Callable[[list[str]], list[list[int]]]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    """Runs the planner: whether keys are split, thread blocks, room for them, tile, partial
    rows, keys of a thread block at most."""
    compiler, found = shutil.which("c++"), importlib.util.find_spec("flashinfer")
    if compiler is None or found is None or found.origin is None:
        pytest.skip("needs FlashInfer and a C++ compiler")
    header = (Path(found.origin).parent / HEADER).read_text()
    functions = [
        re.search(rf"(?:template <typename IdType>\n)?inline auto {name}\(.*?\n}}\n", header, re.S)
        for name in NAMES
    ]
    folder = tmp_path_factory.mktemp("planner")
    source = BEFORE + "".join(each[0] for each in functions if each is not None) + AFTER
    (folder / "plan.cpp").write_text(source.replace("BLOCKS", str(BLOCKS)))
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-o", folder / "plan", folder / "plan.cpp"], check=True
    )

    def run(cases: list[str]) -> list[list[int]]:
        out = subprocess.run(
            [folder / "plan"], input="\n".join(cases), capture_output=True, text=True, check=True
        )
        return [[*map(int, line.split())] for line in out.stdout.splitlines()]

    return run


def a_step(random: Random, most: int, page: int) -> Paged:
    """Decodes and pieces of prompts of at most so many tokens together."""
    left = random.randint(2, most)
    decodes = random.randrange(left - 1)
    requests = [(random.randrange(3000), 1) for _ in range(decodes)]
    left -= decodes
    while left > 0:
        count = random.randint(min(2, left), left)
        requests.append((random.randrange(2000), count))
        left -= count
    return Paged(tuple(requests), page)


@pytest.mark.parametrize("heads", [(32, 8), (14, 2), (28, 4), (8, 8)], ids=str)
def test_all_mixed_steps_of_a_size_have_one_plan_and_fit_into_it(
    plan: Plans, heads: tuple[int, int]
) -> None:
    """A graph contains the plan's room, tile and whether keys are split."""
    random, cases, sizes = Random(1), list[str](), list[int]()
    num_heads, kv_heads = heads
    for size in mixed_sizes(256):
        disables = size * kv_heads > BLOCKS
        layouts = [blank_layout(size, 0, 16)]
        layouts += [padded(a_step(random, size, 16).layout(), size, 0) for _ in range(12)]
        for layout in layouts:
            tables = PageTables.of(layout).widened(size)
            for window in (-1, 1023):
                numbers = (num_heads, kv_heads, size, 16, window, int(disables), 1)
                rows = (*numbers, *tables.qo_indptr.tolist(), *tables.kv_indptr.tolist())
                cases.append(" ".join(map(str, rows)))
                sizes.append(size)
    found = plan(cases)
    assert len(found) == len(cases)
    for size in mixed_sizes(256):
        plans = np.array([each for each, of in zip(found, sizes, strict=True) if of == size])
        is_split, blocks, room, tile, partial, _ = plans.T
        assert len({*zip(is_split.tolist(), room.tolist(), tile.tolist(), strict=True)}) == 1
        assert tile[0] == 16
        assert (blocks <= room).all()
        assert (partial * (num_heads // kv_heads) <= room * tile).all()


@pytest.mark.parametrize("heads", [(32, 8), (40, 2)], ids=str)
def test_with_as_many_requests_as_rows_every_step_has_the_tile_of_decodes(
    plan: Plans, heads: tuple[int, int]
) -> None:
    """Without graphs, in batch-invariant mode."""
    random, cases = Random(1), list[str]()
    for _ in range(20):
        tables = PageTables.of(a_step(random, 300, 16).layout())
        size = tables.num_rows
        numbers, tables = (*heads, size, 16, -1, 1, 0), tables.widened(size)
        rows = (*numbers, *tables.qo_indptr.tolist(), *tables.kv_indptr.tolist())
        cases.append(" ".join(map(str, rows)))
    assert {each[3] for each in plan(cases)} == {16 if heads == (32, 8) else 64}
