"""What a worker leaves out when it imports torch."""

import sys
from pathlib import Path
from types import ModuleType

META_REGISTRATIONS = "torch._meta_registrations"
NVIDIA = Path("/dev/nvidiactl")  # exists where a process may use an NVIDIA GPU


def skip_meta_registrations() -> None:
    """Import torch without its operators on tensors that have no contents.

    Only tracing and compiling a model use them, which a worker does at most on a GPU. They take a
    quarter of the import.
    """
    if not NVIDIA.exists():
        sys.modules.setdefault(META_REGISTRATIONS, ModuleType(META_REGISTRATIONS))
