"""Modules of packages that are not imported, because their functions are not called.

Kernels are described by modules that need a compiler to compile them, and torch to be called. A
process that does only one of both imports placeholders of the other: their attributes and results
are placeholders, and as decorators they return the function.
"""

import sys
from types import FunctionType, ModuleType

COMPILER = (
    "llvmlite",
    "llvmlite.binding",
    "llvmlite.ir",
    "numba",
    "numba.core",
    "numba.core.cgutils",
    "numba.core.config",
    "numba.extending",
    "numba.np",
    "numba.np.arrayobj",
    "numba.types",
)
TORCH = "torch", "torch.nn", "torch.nn.functional"


class Placeholder:
    """Stands for an object of a package that is not imported."""

    def __getattr__(self, name: str) -> "Placeholder":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> object:
        if len(args) == 1 and isinstance(args[0], FunctionType) and not kwargs:
            return args[0]
        return self

    def __or__(self, other: object) -> "Placeholder":
        """A type in an annotation, with another one."""
        return self


class _PlaceholderModule(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", Placeholder())


def stand_in(*names: str) -> None:
    """Import placeholders instead of these modules from now on."""
    for name in names:
        sys.modules[name] = _PlaceholderModule(name)
