import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from engine.transport.process_memory import SMAPS, drop_library_pages, trim_heap
from tests.engine.transport.process_memory import SIZE, faults_of_buffers, resident

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


def counted(keeps: bool) -> int:
    module = faults_of_buffers.__module__
    code = f"from {module} import faults_of_buffers; faults_of_buffers({keeps})"
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return int(found.stdout)


def test_buffers_that_are_allocated_again_and_again_cause_no_page_faults() -> None:
    assert counted(keeps=True) < 1000 < counted(keeps=False)
