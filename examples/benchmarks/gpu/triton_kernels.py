"""Compiles our Triton kernels on this GPU and compares each with plain torch.

    python -m examples.benchmarks.gpu.triton_kernels

Prints the kernels that workers will use, as JSON; the log names the others and why. Workers do the
same at their start, so that a kernel that does not work here costs speed only.
"""

import json
import logging
import sys

from engine.worker.cuda.kernels.library import TRIALS, load


def main() -> int:
    """The exit code is 1 if a kernel is not used."""
    import torch

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = load(place, torch.bfloat16 if place.type == "cuda" else torch.float16)
    used = [name for name in TRIALS if getattr(kernels, name) is not None]
    print(json.dumps({"used": used, "not used": [name for name in TRIALS if name not in used]}))
    return int(len(used) < len(TRIALS))


if __name__ == "__main__":
    sys.exit(main())
