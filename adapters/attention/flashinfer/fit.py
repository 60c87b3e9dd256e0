"""What FlashInfer's kernels serve, and what to take where they do not."""

import importlib
import importlib.util

import torch

from adapters.attention.flashinfer.fp8 import FP8
from engine.worker.ports import AttentionSpec

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
CAPABILITY = (8, 0)  # bfloat16; 8-bit floats are widened in the kernel
MOST_STRIDE = 1 << 32  # elements of a page
INSTEAD = "--attention reference computes it in plain torch, slowly"


def unfit(spec: AttentionSpec, kv_dtype: torch.dtype, block_size: int) -> str:
    """One line about the first thing of a model that no kernel serves, "" if all is well."""
    named = str(spec.dtype).removeprefix("torch.")
    if spec.dtype not in DTYPES:
        return f"dtype {named} has no kernel, only bfloat16 and float16 do; {INSTEAD}"
    if kv_dtype not in (spec.dtype, FP8):
        kept = str(kv_dtype).removeprefix("torch.")
        return f"KV in {kept} under {named} has no kernel; --kv-cache-dtype is {named} or fp8"
    if spec.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        return f"head_dim {spec.head_dim} has no kernel, only {known} do; {INSTEAD}"
    if spec.num_heads % spec.num_kv_heads:
        return (
            f"{spec.num_heads} heads cannot share {spec.num_kv_heads} heads of keys and values "
            "evenly"
        )
    if block_size * spec.num_kv_heads * spec.head_dim >= MOST_STRIDE:
        return f"block_size {block_size} is too large for 32-bit strides"
    return ""


def absent(device_count: int) -> str:
    """One line about what this machine lacks, "" if nothing; imports FlashInfer if it is there."""
    if device_count == 0:
        return "there is no GPU that torch can use"
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, 8.0 is needed"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install 'podway[cuda]')"
    try:
        importlib.import_module("flashinfer")
    except ImportError as error:
        return f"flashinfer cannot be imported: {error}"
    return ""
