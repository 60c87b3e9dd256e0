"""Page-locked host memory of exactly the requested size.

torch's host allocator rounds every allocation up to a power of two, so that a host tier of 40 GiB
would lock 64 GiB. Large allocations are therefore ordinary memory that is registered with CUDA;
copies from and to it are asynchronous, as with torch's own page-locked memory.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from engine.errors import StartupError

EXACT_BYTES = 64 << 20  # allocations from this size on are registered
GIB = 1 << 30


def pinned(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised page-locked memory. A large tensor must live as long as the process.

    Raises `StartupError` if the system does not lock that much memory.
    """
    num_bytes = prod(sizes) * dtype.itemsize
    if num_bytes < EXACT_BYTES:
        return torch.empty(tuple(sizes), dtype=dtype, pin_memory=True)
    tensor = torch.empty(tuple(sizes), dtype=dtype)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call] # the stubs lack it
    status = int(cudart.cudaHostRegister(tensor.data_ptr(), num_bytes, 0))
    if status:
        raise StartupError(
            f"{num_bytes / GIB:.1f} GiB of host memory cannot be page-locked (CUDA error {status});"
            " lower --host-kv-memory or raise the limit of locked memory (ulimit -l)"
        )
    return tensor
