"""An estimate of decode steps of Llama-3.1-8B on an H200 that no GPU has run yet.

    python -m examples.benchmarks.gpu.estimate

Bytes and launches are counted: bytes from the model's shape, launches by
`tests/engine/worker/cuda/model/test_launches.py`. An H200 measured the seconds of attention; the
shares of the bandwidth that products reach and the seconds of small kernels are such that the
layers take as long as it measured (`results/gpu`). Those of batch-invariant products and all of
products with 4-bit weights are assumptions: these take as long as reading them, or as the
instructions that the compiled loop has per weight, whichever is longer.
"""

from dataclasses import dataclass

GB = 1e9
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 32, 4096, 14336, 32, 8, 128, 128256
ITEM = 2  # bytes of a bfloat16
ITEM_4_BITS = 0.5625  # of int4 in groups of 32 with a float16 scale
REQUESTS, CONTEXT = 64, 1024

BANDWIDTH = 4.3e12  # bytes/s of a copy on an H200; 4.8e12 on paper
FA2, OURS = 73.0e-6, 66.0e-6  # seconds of a layer's attention
SMALL_KERNEL = 1.5e-6  # of a norm, gate, RoPE or sum of runs; the kernels beside it hide a part
PROCESSORS, CLOCK, LANES = 132, 1.7e9, 128  # instructions of so many threads in a cycle
# Of a loop over 128 inputs in the machine code for sm_90a, by the weights that a thread decodes in
# it, for tiles of 16 and 64 rows and groups of 32.
INSTRUCTIONS = {16: 523 / 128, 64: 443 / 64}
ISSUED = 0.7  # of the instructions that could be, an assumption
MORE_IN_4_BITS = 5  # kernels of a layer: the gate, and sums of the parts of four products
OUTSIDE = 0.15e-3  # seconds of plan, sampling (greedy) and copies that nothing hides


@dataclass(frozen=True)
class Assumption:
    """One version of the decode step."""

    name: str
    gemm: float  # share of the bandwidth
    attention: float  # seconds of a layer
    small: int  # launches of a layer that are neither GEMM nor attention

    @property
    def seconds(self) -> float:
        """Of a step."""
        layer = self.attention + self.small * SMALL_KERNEL
        return weight_bytes() / (self.gemm * BANDWIDTH) + LAYERS * layer + OUTSIDE


APART = Assumption("attention by FA2, gates in kernels of their own", 0.81, FA2, 4)
FUSED = Assumption("attention by our kernel, gates in products", 0.83, OURS, 4)
INVARIANT = Assumption("`--batch-invariant`: one tiling without splits, FA2", 0.65, FA2, 4)
VERSIONS = (APART, FUSED, INVARIANT)


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
    reading = ITEM_4_BITS * num_weights() / (FUSED.gemm * BANDWIDTH)
    tile = 16 if requests <= 16 else 64
    rate = PROCESSORS * CLOCK * LANES * ISSUED / INSTRUCTIONS[tile]
    products = max(reading, -(-requests // tile) * num_weights() / rate)
    attention = LAYERS * OURS * requests / REQUESTS
    small = LAYERS * (FUSED.small + MORE_IN_4_BITS) * SMALL_KERNEL
    return products + attention + small + OUTSIDE


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
