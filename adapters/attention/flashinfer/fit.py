"""Which shapes and machines FlashInfer's kernels support."""

import importlib
import importlib.util

import torch

from engine.worker.cuda.kernels.reference import FP8
from engine.worker.ports import AttentionSpec

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256, 512)  # FlashInfer tests FA2 with these
LOAD_BYTES = 16  # a head begins at a multiple of what a thread loads at once
CAPABILITY = (8, 0)  # Ampere: the first with bfloat16; fp8 KV is converted in the kernel
MAX_STRIDE = 1 << 32  # elements of a page
LATENT, TURNED = 512, 64  # the kernel's latent vectors, and the keys with RoPE before them
LATENT_TILE = 128  # heads times tokens that share a run of keys; 64 if there are few
ALTERNATIVE = "--attention reference supports it, slowly, in plain torch"


def unsupported_shape(spec: AttentionSpec, kv_dtype: torch.dtype, block_size: int) -> str:
    """The first property of a model that no kernel supports, in one line; "" if all are
    supported."""
    named = str(spec.dtype).removeprefix("torch.")
    if spec.dtype not in DTYPES:
        return f"dtype {named} is not supported, only bfloat16 and float16 are; {ALTERNATIVE}"
    if not spec.is_causal or spec.sees_images:
        return f"attention in both directions is not supported; {ALTERNATIVE}"
    if kv_dtype not in (spec.dtype, FP8):
        kept = str(kv_dtype).removeprefix("torch.")
        return (
            f"a KV cache in {kept} with dtype {named} is not supported; --kv-cache-dtype must be "
            f"{named} or fp8"
        )
    if spec.values_from is not None:
        return _unsupported_latents(spec, kv_dtype)
    if spec.head_dim * kv_dtype.itemsize % LOAD_BYTES or spec.head_dim > HEAD_DIMS[-1]:
        step = LOAD_BYTES // kv_dtype.itemsize
        return (
            f"head_dim {spec.head_dim} is not supported, only multiples of {step} up to "
            f"{HEAD_DIMS[-1]} are; {ALTERNATIVE}"
        )
    if spec.num_heads % spec.num_kv_heads:
        return (
            f"{spec.num_heads} attention heads are not a multiple of {spec.num_kv_heads} KV heads"
        )
    if block_size * spec.num_kv_heads * spec.head_dim >= MAX_STRIDE:
        return f"block_size {block_size} is too large for 32-bit strides"
    return ""


def _unsupported_latents(spec: AttentionSpec, kv_dtype: torch.dtype) -> str:
    """The same of attention to latent vectors, of which the kernel knows one size."""
    turned, latent, heads = spec.values_from, spec.value_dim, spec.num_heads
    if (turned, latent) != (TURNED, LATENT):
        return (
            f"latent vectors of {latent} + {turned} are not supported, only those of "
            f"{LATENT} + {TURNED} are"
        )
    if spec.is_batch_invariant:
        return "latent vectors are not supported with --batch-invariant, their keys are split"
    if kv_dtype != spec.dtype:
        return "latent vectors in 8 bits are not supported"
    if heads > LATENT_TILE:
        return f"{heads} heads with latent vectors are not supported, at most {LATENT_TILE} are"
    if spec.window is not None or spec.soft_cap is not None or spec.has_sinks:
        return "latent vectors with a sliding window, a soft cap or sinks are not supported"
    return ""


def kernel_dim(head_dim: int) -> int:
    """The head size of the kernel for such heads, which reads zeros of q behind them."""
    return next(each for each in HEAD_DIMS if each >= head_dim)


def latent_heads(num_heads: int) -> int:
    """The heads of the kernel for latent vectors: a power of two.

    Other numbers do not divide its tile; of the token that is then in two tiles, FlashInfer 0.7.2
    leaves out the last key where that begins a tile of keys, and its wrapper rejects such steps.
    """
    return 1 << (num_heads - 1).bit_length()


def missing_requirement(device_count: int) -> str:
    """What this machine lacks to run FlashInfer, in one line; "" if nothing. Imports FlashInfer."""
    if device_count == 0:
        return "there is no GPU that torch can use"
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        major, minor = capability
        return f"the GPU has compute capability {major}.{minor}; 8.0 or later is needed"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install 'podway[cuda]')"
    try:
        importlib.import_module("flashinfer")
    except ImportError as error:
        return f"flashinfer cannot be imported: {error}"
    return ""
