"""How a product is divided among thread blocks."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows, outputs and inner elements of a tile, and how its program is compiled.

    The inner dimension is divided among `splits` programs. The order of sums, and so the result,
    depends on `block_k` and `splits` only.
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return "x".join(map(str, astuple(self)))
