"""Code of libraries and freed heap leave the memory of a process; buffers of steps stay."""

import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from engine.transport.process_memory import SMAPS, drop_library_pages, keep_heap, trim_heap
from tests.engine.transport.process_memory import resident

SIZE = 1 << 20

pytestmark = pytest.mark.skipif(not SMAPS.exists(), reason="only Linux reports it")


def test_the_code_of_libraries_is_given_back_and_still_runs() -> None:
    (library,) = (Path(torch.__file__).resolve().parent / "lib").glob("libtorch_cpu.so")
    x = torch.arange(64.0).view(8, 8)
    product = x @ x
    before = resident(library)
    drop_library_pages()
    assert resident(library) < before / 2
    assert torch.equal(x @ x, product)


def test_freed_memory_between_memory_in_use_is_given_back() -> None:
    tensors = [torch.ones(25_000) for _ in range(1000)]
    del tensors[:-1]
    before = psutil.Process().memory_info().rss
    trim_heap()
    assert psutil.Process().memory_info().rss < before - 50 * SIZE


def page_faults() -> int:
    """Page faults of this process for which nothing was read."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def faults_of_buffers(keeps: bool) -> None:
    """Write the page faults of four buffers of 12 MiB that are allocated and freed 10 times, after
    the first time."""
    if keeps:
        keep_heap()
    before = 0
    for round_number in range(11):
        buffers = [bytearray(12 * SIZE) for _ in range(4)]
        del buffers
        if round_number == 0:
            before = page_faults()
    sys.stdout.write(f"{page_faults() - before}\n")


def counted(keeps: bool) -> int:
    code = f"from {__name__} import faults_of_buffers; faults_of_buffers({keeps})"
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return int(found.stdout)


def test_buffers_that_are_allocated_again_and_again_cause_no_page_faults() -> None:
    assert counted(keeps=True) < 1000 < counted(keeps=False)
