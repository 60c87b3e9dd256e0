"""Programmatic dependent launch: a kernel is set up while the one before it still runs.

A launch leaves a GPU idle for about a microsecond, and many kernels of a decode step take few. From
Hopper on, a kernel launched in this way starts when all thread blocks of the one before
have called `griddepcontrol.launch_dependents` or ended, and `griddepcontrol.wait` returns when that
kernel has ended and what it wrote is visible (CUDA programming guide, "Programmatic dependent
launch and synchronization"; PTX, "griddepcontrol").

Each of our kernels calls both before it reads or writes memory. So it ends after the one before it
has, and a kernel that has ended implies that all before it have: it may read what any of them wrote
and overwrite what any of them read. Kernels launched in the usual way, as torch's are, start when
all before them have ended. FlashInfer's wait too, and read only a step's tables before.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import functools

import torch
import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CAPABILITY = (9, 0)


@triton.jit
def wait(IS_DEPENDENT: tl.constexpr):
    """Lets the next kernel start, and waits for the one before; the first thing in a kernel."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@functools.cache
def launch_options(place: torch.device) -> dict[str, bool]:
    """How our kernels are launched on this device: the constant and Triton's option."""
    is_compiled = place.type == "cuda" and not triton.knobs.runtime.interpret
    is_dependent = is_compiled and torch.cuda.get_device_capability(place) >= CAPABILITY
    return {"IS_DEPENDENT": True, "launch_pdl": True} if is_dependent else {"IS_DEPENDENT": False}
