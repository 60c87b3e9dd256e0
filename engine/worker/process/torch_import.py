"""What a worker leaves out when it imports torch and numba."""

import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

META_REGISTRATIONS = "torch._meta_registrations"
SCIPY = "scipy"
# Modules that no model uses, nor any other module of torch while it is imported; in the order in
# which torch imports them, without which some cannot be imported.
UNUSED = (
    "torch.utils.data",
    "torchgen",
    "torchgen.model",
    "torch.distributions",
    "torch.nested",
    "torch.optim",
    "torch.profiler",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.quantization",
    "torch.masked",
    "torch.export",
    "torch._higher_order_ops",
    "torch.func",
    "torch.compiler",
    "torch._native",
)
# Functions that torch itself names again; each imports its module when it is called.
FUNCTIONS = {
    ("torch._higher_order_ops", "cond"),
    ("torch._higher_order_ops", "while_loop"),
    ("torch.func", "vmap"),
}
TESTED = "2.13."  # the versions of torch whose modules were found to be unused
NVIDIA = Path("/dev/nvidiactl")  # exists where a process may use an NVIDIA GPU


def skip_meta_registrations() -> None:
    """Import torch without its operators on tensors that have no contents.

    Only tracing and compiling a model use them, which a worker does at most on a GPU. They take a
    quarter of the import.
    """
    if not NVIDIA.exists():
        sys.modules.setdefault(META_REGISTRATIONS, ModuleType(META_REGISTRATIONS))


def skip_scipy() -> None:
    """Import numba without SciPy, if that is installed.

    Numba imports it for kernels that call BLAS, of which there are none. It takes a tenth of a
    worker's CPU seconds until it has loaded the built-in model, and 10 MiB.
    """
    if not NVIDIA.exists():
        sys.modules.setdefault(SCIPY, None)  # type: ignore[arg-type]  # importing it fails


def import_unused_later() -> None:
    """After `skip_meta_registrations`: import torch's `UNUSED` modules when an attribute of one is
    read, or another module of torch is imported later, which a worker does not do. They take a
    third of the import. Other versions than `TESTED` are imported as a whole."""
    if not NVIDIA.exists() and _torch_version().startswith(TESTED):
        sys.meta_path.insert(0, _LaterFinder())


def _torch_version() -> str:
    """The version that torch will have; "" if no file says it where one is expected."""
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).with_name("version.py")
    said = re.search(r"__version__ = '([^']+)'", path.read_text()) if path.exists() else None
    return said[1] if said else ""


class _LaterModule(ModuleType):
    """A module whose code runs when an attribute is missing for the first time."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # the import system looks for them
            raise AttributeError(name)
        if (self.__name__, name) in FUNCTIONS:
            return lambda *args, **kwargs: _read(self, name)(*args, **kwargs)
        return _read(self, name)


def _read(module: ModuleType, name: str) -> Any:
    """An attribute of a module, after its code has run."""
    if any(isinstance(finder, _LaterFinder) for finder in sys.meta_path):
        _run_unused()
    _run(module)
    return getattr(module, name)


def _run_unused() -> None:
    """Run the code of all modules that are left out, in torch's order."""
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _LaterFinder)]
    for name in UNUSED:
        _run(sys.modules.get(name))


def _run(module: ModuleType | None) -> None:
    """Run the code of a module, unless it has run."""
    if isinstance(module, _LaterModule):
        module.__class__ = ModuleType  # type: ignore[assignment]  # as it is without this class
        assert isinstance(module.__loader__, _LaterLoader), "a finder made it"
        module.__loader__.loader.exec_module(module)


class _LaterLoader(Loader):
    """Makes a module whose code `loader` runs later."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _LaterModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """The module runs its code itself."""


class _LaterFinder(MetaPathFinder):
    """Finds the `UNUSED` modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in UNUSED:
            if fullname.startswith("torch.") and not _is_importing("torch"):
                _run_unused()  # what another module of torch expects
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LaterLoader(spec.loader)
        return spec


def _is_importing(name: str) -> bool:
    """Whether a module's code has begun to run and has not ended."""
    return bool(getattr(sys.modules[name].__spec__, "_initializing", False))
