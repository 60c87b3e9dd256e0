"""Compiles every Triton kernel for a GPU that need not be present, and prints what it takes.

    python -m examples.benchmarks.gpu.compile_kernels [--capability 90] [--json FILE]

Triton brings its own assembler, so that neither a GPU nor the CUDA toolkit is needed. The variants
are those of Llama-3.1-8B and Qwen2.5-7B; 90 is Hopper, assembled as sm_90a. Reports registers per
thread, bytes of registers spilled to memory, and bytes of shared memory. From Hopper on kernels are
compiled for a programmatic dependent launch, and must wait for the kernel before them first.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

PACKAGE = "engine.worker.cuda.kernels"
USAGE = re.compile(r"REG:(\d+).*?STACK:(\d+).*?SHARED:(\d+)")
WAIT = "griddepcontrol.wait"
ACCESS = re.compile(r"\b(?:ld|st|cp|red|atom)\.(?!param|shared)")  # of memory that kernels share


@dataclass(frozen=True)
class Variant:
    """A kernel with the types of its arguments and its compile-time constants."""

    module: str
    kernel: str
    name: str
    types: dict[str, str]  # of the arguments that are not constants; int32 unless named
    constants: Mapping[str, object]
    options: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """What the assembler reports about a variant."""

    name: str
    registers: int  # per thread
    stack_bytes: int  # per thread: spilled registers
    shared_bytes: int  # per thread block
    num_warps: int
    waits_first: bool  # for the kernel before it, ahead of any access to memory


def variants() -> Iterator[Variant]:
    """All kernels, in the types and widths that matter."""
    yield from _rope()
    yield from _rows()
    types = {"found": "*bf16", "sums": "*fp32", "sinks": "*fp32", "out": "*bf16"}
    types["first"] = "*i32"
    for name, has_sinks, dim in (("merge_parts", False, 128), ("merge_parts sinks", True, 64)):
        constants: dict[str, object] = {
            "NUM_HEADS": 32,
            "DIM": dim,
            "HAS_SINKS": has_sinks,
            "MIN_PARTS": 1,
        }
        yield Variant("parts", "kernel", name, types, constants, {"num_warps": 1})
    yield from _decode_attention()
    yield from _recurrent()
    yield from _lora()
    yield from _experts()
    yield from _products()
    yield from _four_bit()
    yield from _products_with_fp8()
    for top_k, top_p in ((False, False), (True, True)):
        types = {"logits": "*fp32", "weights": "*fp32", "sampled": "*i64", "top_ks": "*i64"}
        types |= dict.fromkeys(("temperatures", "min_ps"), "*fp32")
        types |= dict.fromkeys(("top_ps", "points"), "*fp64") | {"large": "*fp32", "places": "*i32"}
        constants = {"HAS_TOP_K": top_k, "HAS_TOP_P": top_p, "MAX": 8192, "BLOCK": 2048}
        name = f"sample{' top-k top-p' * top_k}"
        yield Variant("sampling", "kernel", name, types, constants, {"num_warps": 16})


def _rope() -> Iterator[Variant]:
    pointers = dict.fromkeys(("q", "k", "v", "q_out"), "*bf16")
    pointers |= {"cos": "*fp32", "sin": "*fp32", "slots": "*i64"}
    pointers |= {"k_factor": "fp32", "v_factor": "fp32"}
    shape = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "BLOCK_HEADS": 8}
    shape |= {"HALF": 64, "ROTATED": 64, "BLOCK_HALF": 64, "Q_OUT_DIM": 128, "PAGE": 16}
    latents = {"NUM_HEADS": 128, "NUM_KV_HEADS": 1, "BLOCK_HEADS": 1, "Q_OUT_DIM": 576}
    latents |= {"HALF": 288, "ROTATED": 32, "BLOCK_HALF": 512}
    module = "rope_and_cache_write"
    for name, kept, changes in (
        ("bf16", "bf16", {}),
        ("fp8e4nv", "fp8e4nv", {}),
        ("heads of 80", "bf16", {"HALF": 40, "ROTATED": 40}),
        ("q alone", "bf16", {"NUM_KV_HEADS": 0}),
        ("latent vectors", "bf16", latents),
    ):
        types = pointers | {"keys": f"*{kept}", "values": f"*{kept}"}
        constants = {**shape, "IS_FP8": kept != "bf16", "WRITES_Q": True, **changes}
        yield Variant(module, "kernel", f"{module} {name}", types, constants, {"num_warps": 4})


def _rows() -> Iterator[Variant]:
    module = import_module(f"{PACKAGE}.rows")
    warps = module.warps_for
    types = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32"}
    constants: dict[str, object]
    for heads, block in ((1, 4096), (1, module.MAX_PAIR_WIDTH), (8, 128)):
        constants, options = (
            {"BLOCK_HEADS": heads, "BLOCK": block},
            {"num_warps": warps(heads * block)},
        )
        yield Variant("rows", "norm_kernel", f"norm {heads} x {block}", types, constants, options)
    for name in ("silu", "gelu", "gelu_new"):
        constants = {"GATE": module.GATES[name], "BLOCK": module.GATED_COLUMNS}
        options = {"num_warps": warps(module.GATED_COLUMNS)}
        yield Variant("rows", "gate_kernel", f"gate {name}", types, constants, options)
    for kept, most in (("i8", 127.0), ("fp8e4nv", 448.0)):
        for name, block, norm, act in (
            ("quantize", 4096, False, 0),
            ("quantize", 32768, False, 0),
            ("norm and quantize", 8192, True, 0),
            ("silu and quantize", 16384, False, 1),
        ):
            types = {"x": "*bf16", "weight": "*bf16", "values": f"*{kept}", "scales": "*fp32"}
            constants = {"MOST": most, "IS_INT8": kept == "i8"}
            constants |= {"HAS_NORM": norm, "GATE": act}
            yield Variant(
                "rows",
                "quantize_kernel",
                f"{name} {kept} {block}",
                types | {"eps": "fp32"},
                {**constants, "BLOCK": block},
                {"num_warps": warps(block)},
            )


def _decode_attention() -> Iterator[Variant]:
    """Heads of Llama in bfloat16 and fp8, of Gemma, of gpt-oss with sinks."""
    module = import_module(f"{PACKAGE}.decode_attention")
    for dim, group, kept, more in (
        (128, 4, "bf16", {}),
        (128, 4, "i16", {}),
        (64, 8, "bf16", {"HAS_SINKS": True}),
        (256, 2, "bf16", {"HAS_CAP": True}),
        (512, 8, "bf16", {}),
    ):
        types = {"q": "*bf16", "keys": f"*{kept}", "values": f"*{kept}", "runs": "*i32"}
        types |= {"pages": "*i32", "sinks": "*fp32", "sums": "*fp32"}
        types |= {"out": "*bf16", "parts": "*fp32"}
        types |= dict.fromkeys(("score_factor", "out_factor", "cap"), "fp32")
        tiling = module.tiling_of(dim, 1 if kept == "i16" else 2)
        constants = {
            "NUM_HEADS": 8 * group,
            "GROUP": group,
            "HEADS": module.MIN_HEADS,
            "DIM": dim,
            "PAGE": 16,
        }
        constants |= {"TILE": tiling.tokens, "IS_FP8": kept == "i16"}
        constants |= dict.fromkeys(("HAS_CAP", "HAS_SINKS"), False) | more
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        name = " ".join(("attend_decodes", str(dim), kept, *more))
        yield Variant("decode_attention", "kernel", name, types, constants, options)


def _recurrent() -> Iterator[Variant]:
    """The layers of Qwen3.5-4B, Granite 4, Falcon-H1 and LFM2."""
    module = import_module(f"{PACKAGE}.recurrence")
    types = dict.fromkeys(("weights", "bias", "state", "states", "mixed"), "*fp32")
    types |= dict.fromkeys(("rates", "biases", "skips", "weight", "x"), "*fp32")
    types |= {"y": "*bf16", "runs": "*i64", "writes": "*i64", "eps": "fp32"}
    for taps, is_gated, is_first in product((4, 3), (False, True), (False, True)):
        constants: dict[str, object] = {"TAPS": taps, "IS_FIRST": is_first, "IS_GATED": is_gated}
        constants |= {"HAS_BIAS": is_gated, "BLOCK": 256}
        own = types | {"out": "*bf16" if is_gated else "*fp32"}
        name = f"convolve {taps}{' gated' * is_gated}{' first' * is_first}"
        yield Variant("convolution", "convolution_kernel", name, own, constants, {"num_warps": 4})
    for kind, heads, key_dim, value_dim in (
        ("delta", (16, 32), 128, 128),
        ("mamba", (1, 48), 128, 64),
        ("mamba", (1, 24), 256, 64),
    ):
        constants = {"NUM_KEYS": heads[0], "NUM_VALUES": heads[1], "KEY_DIM": key_dim}
        constants |= {"VALUE_DIM": value_dim, "IS_MAMBA": kind == "mamba", "EPS": 1e-6}
        constants |= {"KEYS": key_dim, "VALUES": module.STATE_ELEMENTS // key_dim}
        own = types | {"out": "*bf16" if kind == "mamba" else "*fp32"}
        name = f"scan {kind} {key_dim}"
        yield Variant("recurrence", "scan_kernel", name, own, constants, {"num_warps": 1})
    constants = {"NUM_HEADS": 32, "TILED_KEYS": 16, "DIM": 128, "BLOCK": 128}
    types["out"] = "*bf16"
    yield Variant(
        "recurrence", "gated_norm_kernel", "gated_norm", types, constants, {"num_warps": 1}
    )


def _lora() -> Iterator[Variant]:
    module = import_module(f"{PACKAGE}.lora")
    types = {"x": "*bf16", "y": "*bf16", "inner": "*fp32", "blocks": "*i32"}
    types |= dict.fromkeys(("entries", "rows"), "*i64")
    constants: dict[str, object] = {"RANKS": module.RANKS, "INPUTS": module.INPUTS}
    yield Variant("lora", "down_kernel", "lora down", types, constants, {"num_warps": 4})
    constants = {"RANKS": module.RANKS, "COLUMNS": module.COLUMNS}
    yield Variant("lora", "up_kernel", "lora up", types, constants, {"num_warps": 2})


def _experts() -> Iterator[Variant]:
    """The layers of Qwen3-30B-A3B, and of DeepSeek V3 without groups."""
    module = import_module(f"{PACKAGE}.experts")
    types = dict.fromkeys(("logits", "found", "before", "out"), "*bf16")
    types |= dict.fromkeys(("bias", "scales", "weights"), "*fp32")
    types |= dict.fromkeys(("ids", "ends", "places"), "*i32")
    types |= dict.fromkeys(("sources", "experts"), "*i64")
    for experts, has_sigmoids in ((128, False), (256, True)):
        constants: dict[str, object] = {
            "TOP_K": 8,
            "HAS_SIGMOIDS": has_sigmoids,
            "EXPERTS": experts,
        }
        constants |= {
            "HAS_BIAS": has_sigmoids,
            "HAS_SCALES": False,
            "RENORMALIZES": True,
            "CHOSEN": 8,
        }
        name = f"route {experts}"
        yield Variant("experts", "route_kernel", name, types, constants, {"num_warps": 1})
    constants = {"TOP_K": 8, "BLOCK": module.SORTED}
    yield Variant("experts", "sort_kernel", "sort", types, constants, {"num_warps": 4})
    for has_added in (False, True):
        constants = {"TOP_K": 8, "HAS_ADDED": has_added, "BLOCK": module.COLUMNS}
        name = f"sum{' added' * has_added}"
        yield Variant("experts", "sum_kernel", name, types, constants, {"num_warps": 4})


def _products() -> Iterator[Variant]:
    gemm, found = import_module(f"{PACKAGE}.gemm"), import_module(f"{PACKAGE}.tiling")
    for dtype, kind in (("bf16", "fp32"), ("i8", "i32"), ("fp8e4nv", "fp32")):
        types = {"x_scales": "*fp32", "weight_scales": "*fp32", "bias": "*bf16"}
        types |= {"out": "*bf16", "parts": f"*{kind}"}
        has = {"HAS_SCALES": dtype != "bf16", "HAS_BIAS": False, "HAS_ADDED": True}
        more: tuple[Any, ...] = (found.EIGHT_BIT, found.MORE_ROWS_8_BIT)
        gated = found.GATED, found.MORE_ROWS_GATED, found.MANY_ROWS_GATED
        if dtype == "bf16":
            more = found.WIDE, found.MIDDLE, found.NARROW, found.LONG, found.MORE_ROWS_WIDE
            more += found.MORE_ROWS_MIDDLE, found.MORE_ROWS_NARROW, found.MORE_ROWS_LONG, *gated
        for tiling in dict.fromkeys((found.FIXED, *more)):
            is_gated = tiling in gated
            columns = tiling.block_k
            types["x"] = f"tensordesc<{dtype}[{tiling.block_m}, {columns}]>"
            types["weight"] = f"tensordesc<{dtype}[{tiling.block_n}, {columns}]>"
            constants = {
                "BLOCK_M": tiling.block_m,
                "BLOCK_N": tiling.block_n,
                "BLOCK_K": tiling.block_k,
                "SPLITS": tiling.splits,
                "IS_INT8": dtype == "i8",
                "GATE": int(is_gated),
            }
            constants |= has | ({"HAS_ADDED": False} if is_gated else {})
            options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
            name = f"product {dtype} {'gated ' * is_gated}{tiling}"
            yield Variant("gemm", "product_kernel", name, dict(types), constants, options)
        constants = {"SPLITS": 4, "BLOCK": gemm.REDUCED}
        name = f"add parts {dtype}"
        yield Variant("gemm", "reduce_kernel", name, types, constants | has, {"num_warps": 4})


def _four_bit() -> Iterator[Variant]:
    """Weights of AWQ (groups of 128 with offsets), of int4 (32) and of MXFP4 (32, other codes)."""
    module, found = import_module(f"{PACKAGE}.four_bit"), import_module(f"{PACKAGE}.tiling")
    has = {"HAS_BIAS": False, "HAS_ADDED": True, "CHUNK": module.CHUNK}
    for name, group, is_e2m1 in (("awq", 128, False), ("int4", 32, False), ("mxfp4", 32, True)):
        types = {"x": "*bf16", "words": "*i32", "offsets": "*fp16", "bias": "*bf16", "out": "*bf16"}
        types |= {"scales": "*u8" if is_e2m1 else "*fp16", "parts": "*fp32", "blocks": "*i32"}
        weight = {"GROUP": group, "IS_E2M1": is_e2m1, "HAS_OFFSETS": name == "awq"}
        for tiling, blocks in (
            (found.WIDE_4_BIT, False),
            (found.four_bit_tiling(64, 4096), False),
            (found.FEW_ROWS_4_BIT, True),
            (found.FIXED_4_BIT, True),
        ):
            constants = {
                "BLOCK_M": tiling.block_m,
                "BLOCK_N": tiling.block_n,
                "SPLITS": tiling.splits,
                "HAS_BLOCKS": blocks,
            }
            options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
            kind = f"{name}{' experts' * blocks} {tiling}"
            constants |= has | weight
            yield Variant(
                "four_bit", "product_kernel", f"product {kind}", types, constants, options
            )
        constants = {"BLOCK_N": module.UNPACKED_OUTPUTS, "CHUNK": module.CHUNK} | weight
        options = {"num_warps": 4}
        yield Variant("four_bit", "unpack_kernel", f"unpack {name}", types, constants, options)


def _products_with_fp8() -> Iterator[Variant]:
    found = import_module(f"{PACKAGE}.tiling")
    types = {"x": "*bf16", "weight": "*u8", "scales": "*fp32", "out": "*bf16"}
    types |= {"parts": "*fp32", "bias": "*bf16"}
    tilings = found.WIDE, found.NARROW_FP8, found.MIDDLE_FP8, found.MORE_ROWS_FP8
    for tiling in (found.FIXED_FP8, *tilings):
        constants = {
            "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n,
            "BLOCK_K": tiling.block_k,
            "SPLITS": tiling.splits,
            "RUN": 128,
            "HAS_BIAS": False,
            "HAS_ADDED": True,
        }
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        name = f"product_with_fp8 {tiling}"
        yield Variant("fp8_weights", "product_kernel", name, types, constants, options)


def compiled(variant: Variant, capability: int) -> Compiled:
    """Compile and assemble one variant."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function: Any = getattr(import_module(f"{PACKAGE}.{variant.module}"), variant.kernel)
    constants = dict(variant.constants)
    if "IS_DEPENDENT" in function.arg_names:
        constants["IS_DEPENDENT"] = capability >= 90
    signature = {
        name: "constexpr" if name in constants else variant.types.get(name, "i32")
        for name in function.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, argument in enumerate(function.params)
        if signature[argument.name].startswith(("*", "i")) and not argument.do_not_specialize
    }
    source = ASTSource(function, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    made: Any = compile_kernel(source, target=target, options=variant.options)
    registers, stack, shared = resources(made.asm["cubin"])
    shared = max(shared, int(made.metadata.shared))
    warps, waits = int(made.metadata.num_warps), waits_first(made.asm["ptx"])
    return Compiled(variant.name, registers, stack, shared, warps, waits)


def waits_first(ptx: str) -> bool:
    """Whether the kernel waits before it reads or writes memory."""
    first = ACCESS.search(ptx)
    assert first is not None, "a kernel without any access to memory"
    return WAIT in ptx[: first.start()]


def resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers per thread, stack bytes per thread and static shared bytes, read by cuobjdump."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = USAGE.search(output)
    assert found is not None, f"cuobjdump reports no usage: {output}"
    registers, stack, shared = map(int, found.groups())
    return registers, stack, shared


def main() -> int:
    """Compile all; the exit code is 1 if a kernel spills registers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = [compiled(variant, arguments.capability) for variant in variants()]
    for each in found:
        print(
            f"{each.name:32} {each.registers:4} registers, {each.stack_bytes} bytes spilled, "
            f"{each.shared_bytes} bytes shared, {each.num_warps} warps"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return int(any(each.stack_bytes for each in found))


if __name__ == "__main__":
    sys.exit(main())
