"""On CPUs that this machine is not: kernels are compiled for them and looked at, not run."""

import os
import platform
import subprocess
import sys

import pytest

COMMON = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2"
AVX512 = f"{COMMON},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
LOOK = """
from numba import cfunc
from engine.worker.cpu.build import KERNEL
from engine.worker.cpu.kernels.int8_linear import KERNELS
linear = KERNELS[1]
text = cfunc(KERNEL, nogil=True, error_model="numpy")(linear)._library.get_asm_str()
known = ("vpdpbusd", "vpdpwssd", "vpmaddwd", "%zmm")
print(linear.__name__, *(name for name in known if name in text))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="of x86 alone")
@pytest.mark.parametrize(
    ("name", "features", "expected"),
    [
        ("alderlake", f"{COMMON},+avxvnni", "linear_of_octets vpdpbusd"),
        ("cascadelake", f"{AVX512},+avx512vnni", "linear_of_octets vpdpbusd %zmm"),
        ("skylake-avx512", AVX512, "linear_of_shorts vpmaddwd %zmm"),
        ("haswell", COMMON, "linear_of_shorts vpmaddwd"),
    ],
)
def test_8_bit_linears_use_the_widest_products_of_a_cpu(
    name: str, features: str, expected: str
) -> None:
    told = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    found = subprocess.run(
        [sys.executable, "-c", LOOK], env=told, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == expected
