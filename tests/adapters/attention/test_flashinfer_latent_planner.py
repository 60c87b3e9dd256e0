"""FlashInfer's own planner of attention to latent vectors, compiled for the host, plans our steps.

It is taken out of the installed header; skipped without FlashInfer or a compiler.
"""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from adapters.attention.flashinfer.fit import latent_heads
from adapters.attention.flashinfer.latents import MAX_PIECES, PLAN_BYTES, most_pieces
from adapters.attention.flashinfer.tables import PageTables, TableSizes
from engine.worker.cuda.step.graphs import mixed_sizes
from engine.worker.model.layout import blank_layout, padded
from engine.worker.ports import StepLimits
from tests.adapters.attention.flashinfer_cases import Paged
from tests.adapters.attention.test_flashinfer_planner import a_step

INCLUDE = "data/include/flashinfer"
PROCESSORS = 132  # of an H200
TAKEN = (
    r"inline float cost_function\(.*?\}\n",
    r"template <typename T>\nstd::vector<T> flatten\(.*?\n\}\n",
    r"inline int packed_causal_kv_end\(.*?\n\}\n",
    r"struct MLAPlanInfo \{.*?\n\};\n",
    r"template <typename IdType>\ninline cudaError_t MLAPlan\(.*?\n\}\n",
)
BEFORE = f"""
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <limits>
#include <tuple>
#include <vector>
#include "allocator.h"
#include "attention/heap.h"
using namespace flashinfer;
using std::max, std::min;
enum cudaError_t {{ cudaSuccess }};
using cudaStream_t = int;
enum {{ cudaDevAttrMultiProcessorCount }};
cudaError_t cudaGetDevice(int*) {{ return cudaSuccess; }}
cudaError_t cudaDeviceGetAttribute(int* found, int, int) {{
  *found = {PROCESSORS};
  return cudaSuccess;
}}
#define FLASHINFER_CUDA_CALL(call) call
template <typename A, typename B> auto ceil_div(A x, B y) {{ return (x + y - 1) / y; }}
"""
AFTER = """
int main() {
  int heads, size, bytes;
  size_t parts;
  while (std::cin >> heads >> size >> bytes >> parts) {
    std::vector<int> rows(size + 1), pages(size + 1), lengths(size);
    for (int& each : rows) std::cin >> each;
    for (int& each : lengths) std::cin >> each;
    std::vector<char> ints(bytes + 16), floats(parts + 16);
    MLAPlanInfo info;
    size_t staged;
    MLAPlan<int>(floats.data(), parts, ints.data(), ints.data(), bytes, info, staged, rows.data(),
                 pages.data(), lengths.data(), size, heads, 512, true, 0);
    auto at = [&](int64_t offset) { return GetPtrFromBaseOffset<int>(ints.data(), offset); };
    int* works = at(info.work_indptr_offset);
    int longest = 0, partial = 0, tile = 64 * info.num_blks_x;
    for (int i = 0; i < info.num_blks_y; ++i) {
      int keys = 0;
      for (int w = works[i]; w < works[i + 1]; ++w) {
        keys += at(info.kv_end_offset)[w] - at(info.kv_start_offset)[w];
        int first = at(info.partial_indptr_offset)[w];
        if (first >= 0) partial = std::max(partial, first + tile);
      }
      longest = std::max(longest, keys);
    }
    std::cout << works[info.num_blks_y] << " " << longest << " "
              << partial - 2 * info.num_blks_y * tile;
    for (int64_t each : info.ToVector()) std::cout << " " << each;
    std::cout << std::endl;
  }
}
"""

Plans = Callable[[list[tuple[int, PageTables]]], list[list[int]]]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    """Runs the planner on heads and steps: pieces, keys of a thread block at most, partial rows
    beyond their room, and what a graph contains."""
    compiler, found = shutil.which("c++"), importlib.util.find_spec("flashinfer")
    if compiler is None or found is None or found.origin is None:
        pytest.skip("needs FlashInfer and a C++ compiler")
    include = Path(found.origin).parent / INCLUDE
    header = (include / "attention/scheduler.cuh").read_text()
    parts = [re.search(each, header, re.S) for each in TAKEN]
    folder = tmp_path_factory.mktemp("planner")
    source = BEFORE + "".join(each[0] for each in parts if each is not None) + AFTER
    (folder / "plan.cpp").write_text(source)
    command = [compiler, "-std=c++17", "-O1", "-w", f"-I{include}", "plan.cpp", "-o", "plan"]
    subprocess.run(command, check=True, cwd=folder)

    def run(cases: list[tuple[int, PageTables]]) -> list[list[int]]:
        lines = []
        for heads, tables in cases:
            room = PROCESSORS * 128 * (512 * 2 + 4) + 256
            numbers = (heads, len(tables.kv_len), PLAN_BYTES, room)
            rows = (*numbers, *tables.qo_indptr.tolist(), *tables.kv_len.tolist())
            lines.append(" ".join(map(str, rows)))
        out = subprocess.run(
            [folder / "plan"], input="\n".join(lines), capture_output=True, text=True, check=True
        )
        return [[*map(int, line.split())] for line in out.stdout.splitlines()]

    return run


@pytest.mark.parametrize("heads", [16, 32, 128])
def test_all_steps_of_a_graph_have_the_same_numbers_in_it(plan: Plans, heads: int) -> None:
    random, cases, sizes = Random(1), list[tuple[int, PageTables]](), list[int]()
    for size in (1, 8, *mixed_sizes(256)):
        layouts = [blank_layout(size, 0, 16)]
        if size < 64:
            layouts += [
                padded(Paged(((random.randrange(9000), 1),), 16).layout(), size, 0)
                for _ in range(9)
            ]
        else:
            layouts[0] = replace(layouts[0], num_decodes=0)
            layouts += [padded(a_step(random, size, 16).layout(), size, 0) for _ in range(9)]
        for layout in layouts:
            cases.append((heads, PageTables.of(layout).widened(size)))
            sizes.append(size)
    found = plan(cases)
    assert len(found) == len(cases)
    for size in {*sizes}:
        plans = [each for each, of in zip(found, sizes, strict=True) if of == size]
        assert len({*map(tuple, (each[3:] for each in plans))}) == 1
        assert all(pieces <= MAX_PIECES and beyond <= 0 for pieces, _, beyond, *_ in plans)


@pytest.mark.parametrize("heads", [10, 20, 128])
def test_no_step_has_more_pieces_than_its_limits_say(plan: Plans, heads: int) -> None:
    limits = StepLimits(max_requests=64, max_tokens=2048, max_model_len=20000)
    most = most_pieces(latent_heads(heads), TableSizes.of(limits, 16), PROCESSORS)
    assert most < MAX_PIECES
    random = Random(2)
    steps = [Paged(((random.randrange(19000), 1),) * 64, 16) for _ in range(5)]
    for _ in range(20):
        count = random.randrange(1, 60)
        decodes = tuple((random.randrange(19000), 1) for _ in range(count))
        pieces = tuple((random.randrange(9000), random.randint(2, 480)) for _ in range(4))
        steps.append(Paged((*decodes, *pieces), 16))
    steps += [Paged(((17000, 2048),), 16), Paged(((0, 2048),), 16)]
    found = plan([(latent_heads(heads), PageTables.of(step.layout())) for step in steps])
    assert max(each[0] for each in found) <= most
    assert all(each[2] <= 0 for each in found)


def test_a_long_request_is_divided_beside_short_ones(plan: Plans) -> None:
    """All 73,728 keys are 559 for each multiprocessor; runs have multiples of 256."""
    step = Paged(((1023, 1),) * 40 + ((32767, 1),), 16)
    ((_, longest, *_),) = plan([(16, PageTables.of(step.layout()))])
    assert np.array(step.requests).sum() == 73728
    assert longest == 3 * 256
