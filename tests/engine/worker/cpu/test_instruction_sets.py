"""Kernels for the instruction sets of several CPUs.

Those that this machine can execute run the kernels' tests in a process of their own, in which Numba
compiles for that CPU. All of them are compiled, and their machine code is searched for the widest
instructions.
"""

# mypy: disable-error-code="import-untyped"
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import pytest

from engine.worker.cpu.features import has, has_amx

AVX2 = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
CPUS = {  # Numba's CPU name and features
    "avx2": ("haswell", AVX2),
    "avx_vnni": ("alderlake", f"{AVX2},+avxvnni"),
    "avx512": ("skylake-avx512", AVX512),
    "avx512_vnni": ("cascadelake", f"{AVX512},+avx512vnni"),
    "avx512_bf16": ("cooperlake", f"{AVX512},+avx512vnni,+avx512bf16"),
    "amx": (
        "sapphirerapids",
        f"{AVX512},+avx512vnni,+avx512bf16,+amx-tile,+amx-int8,+amx-bf16",
    ),
}
INTEGERS, FLOATS = ("int8", "int4", "grouped"), ("bfloat16", "attention")
KERNEL_TESTS = {  # of the products that a CPU has instructions of its own for
    cpu: INTEGERS if cpu == "avx_vnni" else (*INTEGERS, *FLOATS) for cpu in CPUS
}
# Without the layouts of weights whose parts other ones have too.
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not process")
INSTRUCTIONS = """
import json, os, sys
import torch  # once, since it takes longer than a kernel
for cpu, (environment, names) in json.loads(sys.argv[1]).items():
    if process := os.fork():
        assert os.waitpid(process, 0)[1] == 0
        continue
    os.environ.update(environment)
    from numba import cfunc
    from engine.worker.cpu.build import KERNEL
    from engine.worker.cpu.linears import floats, int8
    best_first = ("tdpbf16ps", "tdpbusd", "vdpbf16ps", "vpdpbusd", "vpdpwssd", "vpmaddwd", "vfmadd")
    for name in names:
        kernel = getattr(floats if name == "BFLOAT16" else int8, name).kernels[-1]
        compiled = cfunc(KERNEL, nogil=True, error_model="numpy")(kernel)
        text = compiled._library.get_asm_str()
        used = next(each for each in best_first if each in text)
        print(cpu, kernel.__name__, used, *(["%zmm"] if "%zmm" in text else []), flush=True)
    os._exit(0)
"""

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="instruction sets of x86"
)


def numba_variables(cpu: str) -> dict[str, str]:
    name, features = CPUS[cpu]
    return {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}


def can_execute(cpu: str) -> bool:
    host = llvmlite.binding.get_host_cpu_features()
    if cpu == "amx" and not has_amx():  # Linux may not lend it
        return False
    return all(host.get(feature[1:], False) for feature in CPUS[cpu][1].split(","))


def is_own(cpu: str) -> bool:
    """Whether the other tests, in this process, use the same instructions already."""
    return all(
        has(name) == (f"+{name}" in CPUS[cpu][1])
        for name in ("avx512f", "avx512vnni", "avx512bf16", "amx-tile")
    )


# Each takes seconds to compile: not what a CPU shares with the one above it.
FOUND = {
    "avx2": {"FASTEST": "linear_14_bits vpmaddwd", "BFLOAT16": "linear_bfloat16 vfmadd"},
    "avx_vnni": {"FASTEST": "linear_8_bits vpdpbusd", "WITH_14_BITS": "linear_14_bits vpdpwssd"},
    "avx512": {
        "FASTEST": "linear_14_bits vpmaddwd %zmm",
        "BFLOAT16": "linear_bfloat16 vfmadd %zmm",
    },
    "avx512_vnni": {
        "FASTEST": "linear_8_bits vpdpbusd %zmm",
        "WITH_14_BITS": "linear_14_bits vpdpwssd %zmm",
    },
    "avx512_bf16": {"BFLOAT16": "linear_bfloat16 vdpbf16ps %zmm"},
    "amx": {"FASTEST": "linear_8_bits tdpbusd %zmm", "BFLOAT16": "linear_bfloat16 tdpbf16ps %zmm"},
}


@pytest.mark.process
def test_linears_use_the_widest_dot_products_of_each_cpu() -> None:
    """Without its tile registers, kernels do not use AMX."""
    cpus = [cpu for cpu in CPUS if cpu != "amx" or can_execute(cpu)]
    asked = {cpu: (numba_variables(cpu), [*FOUND[cpu]]) for cpu in cpus}
    found = subprocess.run(
        [sys.executable, "-c", INSTRUCTIONS, json.dumps(asked)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [f"{cpu} {line}" for cpu in cpus for line in FOUND[cpu].values()]
    assert found.stdout.splitlines() == lines


# Not `avx512_vnni`: its products of floats are those of `avx512`, its products of integers those of
# `avx512_bf16`. A machine that can execute it runs the latter's, or uses it in the other tests.
# Those of floats of `avx_vnni` are those of `avx2`.
@pytest.mark.process
@pytest.mark.parametrize("cpu", [cpu for cpu in CPUS if cpu != "avx512_vnni"])
def test_the_kernels_of_a_cpu_pass_their_tests(cpu: str) -> None:
    if not can_execute(cpu) or is_own(cpu):
        pytest.skip("not executable here, or what the other tests run")
    here = Path(__file__).parent
    tests = [str(here / f"test_{name}.py") for name in KERNEL_TESTS[cpu]]
    emulated = [] if "vnni" in cpu else ["-k", "not 8_bits"]
    done = subprocess.run(
        [*PYTEST, *emulated, *tests],
        env=os.environ | numba_variables(cpu),
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
