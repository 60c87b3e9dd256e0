"""An estimate of a decode step of Llama-3.1-8B on an H200, before a GPU has measured one.

    python -m examples.benchmarks.gpu.estimate

Bytes and launches are counted: bytes from the model's shape, launches by
`tests/engine/worker/cuda/model/test_launches.py`. Bandwidth, the share of it that each kind of
kernel reaches, and the time of a small kernel are assumptions. No figure of this module was
measured.
"""

from dataclasses import dataclass

GB = 1e9
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 32, 4096, 14336, 32, 8, 128, 128256
ITEM = 2  # bytes of a bfloat16
REQUESTS, CONTEXT = 64, 1024

BANDWIDTH = 4.3e12  # bytes/s that a copy may reach on an H200; 4.8e12 on paper
SMALL_KERNEL = 3e-6  # seconds of a norm, RoPE or copy of 64 rows inside a CUDA graph
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


def weight_bytes() -> int:
    """Weights that a step reads once."""
    qkv, out = (HEADS + 2 * KV_HEADS) * DIM * HIDDEN, HEADS * DIM * HIDDEN
    return ITEM * (LAYERS * (qkv + out + 3 * HIDDEN * INNER) + VOCAB * HIDDEN)


def kv_bytes() -> int:
    """Keys and values that a step reads."""
    return ITEM * REQUESTS * CONTEXT * LAYERS * 2 * KV_HEADS * DIM


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
    return found


def main() -> None:
    """Print the table."""
    print("\n".join(lines()))


if __name__ == "__main__":
    main()
