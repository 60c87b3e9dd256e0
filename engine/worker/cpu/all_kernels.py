"""Every kernel of this package, compiled before a first start."""

from collections.abc import Callable

from engine.worker.cpu.attention import paged_kernels, rope_and_cache_write
from engine.worker.cpu.build import compile_all
from engine.worker.cpu.kernels.dtypes import HAS_BFLOAT16_PAIRS
from engine.worker.cpu.kernels.linears.tile_formats import HAS_AMX
from engine.worker.cpu.linears import FORMATS, linears_of
from engine.worker.cpu.linears.packed_store import PackedStore
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool


def compile_every_kernel(progress: Callable[[str, int, int], None]) -> None:
    """Compile them, and those of the thread pool."""
    attention = (
        *paged_kernels.BY_DTYPE,
        *(paged_kernels.BY_DTYPE_AND_AMX.values() if HAS_AMX else ()),
        *(paged_kernels.BY_DTYPE_IN_PAIRS.values() if HAS_BFLOAT16_PAIRS else ()),
        *paged_kernels.ROWS_BY_DTYPE,
        *((paged_kernels.attend_rows_bfloat16_in_pairs,) if HAS_BFLOAT16_PAIRS else ()),
        paged_kernels.merge_partials,
        *rope_and_cache_write.BY_DTYPE,
    )
    formats = {name: linears_of(name)[name] for name in FORMATS}
    operators = NativeOperators(NativeThreadPool(1), PackedStore(formats))
    compile_all((*operators.kernels, *attention), progress)
