"""Which kernel computes a product of few rows, measured once for each shape and GPU.

A decode step is as fast as its weights are read, and which kernel reads a weight fastest depends on
its shape: torch (cuBLASLt) or one of the tilings of our own Triton kernel. The first start on a GPU
measures all of them and keeps the choice in a file of that GPU, so that later starts, and other
workers, use the same kernels and sample the same tokens.
"""

from engine.worker.cuda.kernels.tiling import Tiling

TORCH = "torch"
MOST_ROWS = 64  # larger products are torch's
ROWS = (16, 64)  # a product is measured with, and uses the choice of, the next of these

TILINGS = (
    Tiling(64, 64, 64, 1, 4, 5),
    Tiling(64, 128, 64, 1, 4, 4),
    Tiling(64, 64, 64, 4, 4, 5),
    Tiling(64, 128, 64, 4, 4, 4),
    Tiling(64, 64, 128, 2, 4, 4),
    Tiling(64, 64, 128, 8, 4, 4),
    Tiling(16, 64, 128, 1, 4, 4),
    Tiling(16, 64, 128, 4, 4, 4),
)
