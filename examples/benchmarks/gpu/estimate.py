"""An estimate of decode steps of Llama-3.1-8B on an H200, before a GPU has measured them.

    python -m examples.benchmarks.gpu.estimate

Bytes and launches are counted: bytes from the model's shape, launches by
`tests/engine/worker/cuda/model/test_launches.py`. Bandwidth, the share of it that each kind of
kernel reaches, and the time of a small kernel are assumptions. A product with 4-bit weights takes
as long as reading them, or as the instructions that its compiled loop has per weight, whichever is
longer. No figure of this module was measured.
"""

from dataclasses import dataclass

GB = 1e9
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 32, 4096, 14336, 32, 8, 128, 128256
ITEM = 2  # bytes of a bfloat16
ITEM_4_BITS = 0.5625  # of int4 in groups of 32 with a float16 scale
REQUESTS, CONTEXT = 64, 1024

BANDWIDTH = 4.3e12  # bytes/s that a copy may reach on an H200; 4.8e12 on paper
SMALL_KERNEL = 3e-6  # seconds of a norm, RoPE or copy of 64 rows inside a CUDA graph
PROCESSORS, CLOCK, LANES = 132, 1.7e9, 128  # instructions of so many threads in a cycle
# Of a loop over 128 inputs in the machine code for sm_90a, by the weights that a thread decodes in
# it, for tiles of 16 and 64 rows and groups of 32.
INSTRUCTIONS = {16: 523 / 128, 64: 443 / 64}
ISSUED = 0.7  # of the instructions that could be, an assumption
SUMS = 4  # kernels of a layer that add the parts of a product
OUTSIDE = 0.15e-3  # seconds of plan, sampling (greedy) and copies that nothing hides


@dataclass(frozen=True)
class Assumption:
    """One version of the decode step."""

    name: str
    gemm: float  # share of the bandwidth
    attention: float
    small: int  # launches of a layer that are neither GEMM nor attention

    @property
    def seconds(self) -> float:
        """Of a step."""
        reads = weight_bytes() / self.gemm + kv_bytes() / self.attention
        return reads / BANDWIDTH + LAYERS * self.small * SMALL_KERNEL + OUTSIDE


VERSIONS = (
    Assumption("separate kernels, split keys in every graph", 0.85, 0.75, 7),
    Assumption("fused kernels, chosen GEMM kernels, no split keys", 0.90, 0.80, 4),
    Assumption("the same, with a decode kernel that packs GQA heads", 0.90, 0.92, 4),
    Assumption("`--batch-invariant`: one tiling without splits, no split keys", 0.65, 0.80, 4),
)


def num_weights() -> int:
    """Weights that a step reads once."""
    qkv, out = (HEADS + 2 * KV_HEADS) * DIM * HIDDEN, HEADS * DIM * HIDDEN
    return LAYERS * (qkv + out + 3 * HIDDEN * INNER) + VOCAB * HIDDEN


def weight_bytes() -> int:
    """Their bytes in bfloat16."""
    return ITEM * num_weights()


def kv_bytes(requests: int = REQUESTS) -> int:
    """Keys and values that a step reads."""
    return ITEM * requests * CONTEXT * LAYERS * 2 * KV_HEADS * DIM


def seconds_in_4_bits(requests: int) -> float:
    """Of a step with int4 weights."""
    fused = VERSIONS[2]
    reading = ITEM_4_BITS * num_weights() / (fused.gemm * BANDWIDTH)
    tile = 16 if requests <= 16 else 64
    rate = PROCESSORS * CLOCK * LANES * ISSUED / INSTRUCTIONS[tile]
    products = max(reading, -(-requests // tile) * num_weights() / rate)
    attention = kv_bytes(requests) / (fused.attention * BANDWIDTH)
    return products + attention + LAYERS * (fused.small + SUMS) * SMALL_KERNEL + OUTSIDE


def floor() -> float:
    """Seconds to read all of it at the assumed bandwidth."""
    return (weight_bytes() + kv_bytes()) / BANDWIDTH


def lines() -> list[str]:
    """The table of `README.md`."""
    found = [
        "| decode step of 64 × 1,024, bfloat16 | estimated ms | of the floor |",
        "|---|---|---|",
    ]
    found.append(
        f"| floor: {(weight_bytes() + kv_bytes()) / GB:.1f} GB at 4.3 TB/s | "
        f"{floor() * 1e3:.1f} | 100 % |"
    )
    for each in VERSIONS:
        share = floor() / each.seconds
        found.append(f"| {each.name} | {each.seconds * 1e3:.1f} | {share * 100:.0f} % |")
    found += [
        "",
        "| decode step with int4 weights | floor of bfloat16, ms | floor, ms | estimated ms |",
        "|---|---|---|---|",
    ]
    for requests in (1, 8, REQUESTS, 4 * REQUESTS):
        kv = kv_bytes(requests)
        floors = (weight_bytes() + kv, ITEM_4_BITS * num_weights() + kv)
        in_ms = [f"{each / BANDWIDTH * 1e3:.1f}" for each in floors]
        in_ms.append(f"{seconds_in_4_bits(requests) * 1e3:.1f}")
        found.append(f"| {requests} × {CONTEXT:,} | {' | '.join(in_ms)} |")
    return found


def main() -> None:
    """Print the table."""
    print("\n".join(lines()))


if __name__ == "__main__":
    main()
