"""What a worker leaves out when it imports torch and numba."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

META_REGISTRATIONS = "torch._meta_registrations"
SCIPY = "scipy"
UNUSED = (  # modules of torch that no model uses, nor any other module of torch
    "torch.distributions",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.optim",
    "torch.quantization",
)
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
    """Import torch's `UNUSED` modules when an attribute of them is first read, which a worker does
    not do. They take a sixth of the import."""
    if not NVIDIA.exists():
        sys.meta_path.insert(0, _LaterFinder())


class _LaterModule(ModuleType):
    """A module of a package whose code runs when an attribute is missing for the first time."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # the import system looks for them
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]  # as it is without this class
        loader = self.__loader__
        assert isinstance(loader, _LaterLoader), "a finder made it"
        loader.loader.exec_module(self)
        return getattr(self, name)


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
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LaterLoader(spec.loader)
        return spec
