import subprocess
import sys

import pytest

GROW = """
import os
from gateway.serve.process import return_large_blocks

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if {returns}:
    return_large_blocks()
bytearray(8 << 20)  # when it is freed, glibc learns to take such blocks from its heap
before, blocks, small = resident(), [], []
for _ in range(32):
    blocks.append(b"x" * (2 << 20))
    small.append(b"y" * 100_000)  # behind it in the heap
blocks.clear()
print((resident() - before) >> 20)
"""


LOAD = """
import importlib, sys
from pathlib import Path
import adapters, gateway.serve.command
from gateway.serve.load import ADAPTERS

directory = Path(adapters.__file__).parent / "builtin"
loads = dict()
for role, target in ADAPTERS.items():
    module, _, name = target.partition(":")
    loads[role] = getattr(importlib.import_module(module), name)
loads["generation_config"](directory), loads["template"](directory, None)
print(len(loads["tokenizer"](directory).encode("a" + " " * 20_000, add_special_tokens=False)) > 1)
print(sorted({unused!r} & sys.modules.keys()))
"""


def grown_mib(*, returns: bool) -> int:
    """MiB that a process keeps of 64 MiB in large objects which it has freed."""
    command = [sys.executable, "-c", GROW.format(returns=returns)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_large_objects_is_returned_when_they_are_freed() -> None:
    assert grown_mib(returns=True) < 8


def test_the_server_imports_nothing_that_only_workers_and_other_models_need() -> None:
    unused = {"torch", "numba", "llvmlite", "numpy", "gguf", "transformers", "safetensors"}
    command = [sys.executable, "-c", LOAD.format(unused=unused)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    assert ran.stdout == "True\n[]\n"
