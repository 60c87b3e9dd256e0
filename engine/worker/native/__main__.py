"""Compile all kernels ahead of a first start: `python -m engine.worker.native`."""

import importlib

from engine.worker.native.build import kernel
from engine.worker.native.team import Team

OF_KERNELS = (
    "engine.worker.native.kernels",
    "engine.worker.native.drawing",
    "adapters.attention.paged",
)

if __name__ == "__main__":
    Team(1)
    for module in OF_KERNELS:
        for function in importlib.import_module(module).KERNELS:
            kernel(function)
