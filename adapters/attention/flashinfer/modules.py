"""The modules that FlashInfer compiles for a model, built side by side.

FlashInfer compiles a module at its first use, so that a first start would compile one after the
other.
"""

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from adapters.attention.flashinfer.fit import LATENT, TURNED, kernel_dim
from engine.worker.ports import AttentionSpec

HOPPER = 9  # the major compute capability
LOOK_SECONDS = 0.5  # between looks for libraries that have appeared


class Module(Protocol):
    """FlashInfer's build specification of one library."""

    name: str
    is_aot: bool  # shipped compiled

    @property
    def jit_library_path(self) -> Path: ...


def fa2(q: torch.dtype, kv: torch.dtype, dim: int, *, window: bool, soft_cap: bool) -> Module:
    """FA2 for queries and keys of these dtypes and heads of `dim`."""
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    make = modules._gen_batch_prefill_primary_module
    module: Module = make("fa2", q, kv, q, torch.int32, dim, dim, 0, window, soft_cap, False)
    return module


def mla(dtype: torch.dtype, capability: tuple[int, int]) -> Module:
    """Attention to latent vectors, in instructions of Hopper where the GPU has them."""
    kernels = "fa3" if capability[0] == HOPPER else "fa2"
    make = importlib.import_module("flashinfer.jit").gen_batch_mla_module
    module: Module = make(kernels, dtype, dtype, dtype, torch.int32, LATENT, TURNED, False)
    return module


def attention_module(
    spec: AttentionSpec, kv_dtype: torch.dtype, capability: tuple[int, int]
) -> Module:
    """What the attention layers of one kind need on such a GPU."""
    if spec.values_from is not None:
        return mla(spec.dtype, capability)
    dtype, dim = spec.dtype, kernel_dim(spec.head_dim)
    has_window, has_cap = spec.window is not None, spec.soft_cap is not None
    return fa2(dtype, kv_dtype, dim, window=has_window, soft_cap=has_cap)


class Build:
    """What became of the modules of a build; `report` gets a line for each."""

    def __init__(self, modules: Sequence[Module], report: Callable[[str], None]) -> None:
        self._modules = modules
        self._report = report
        self._began = time.perf_counter()
        self.cached = [each.name for each in modules if is_built(each)]
        self.seconds: dict[str, float] = {}  # by module, since the beginning
        self.failed: dict[str, str] = {}

    @property
    def missing(self) -> list[Module]:
        """Modules that are neither built nor failed."""
        return [
            each for each in self._modules if not is_built(each) and each.name not in self.failed
        ]

    def run(self, build: Callable[[Sequence[Module]], object]) -> None:
        """Build all modules side by side; if one fails, which ends the build, the others alone."""
        is_over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(is_over,), daemon=True)
        watcher.start()
        try:
            build(self.missing)
        except Exception as error:  # a compiler may raise anything
            self._report(f"the build ended early: {str(error).splitlines()[0]}")
        for each in self.missing:
            try:
                build([each])
            except Exception as error:  # the next module may still be built
                self._fail(each.name, error)
        is_over.set()
        watcher.join()

    def _watch(self, is_over: threading.Event) -> None:
        while not is_over.wait(LOOK_SECONDS):
            self._look()
        self._look()

    def _look(self) -> None:
        """Report the modules that were built since the last look."""
        known = {*self.cached, *self.seconds}
        for each in self._modules:
            if each.name not in known and is_built(each):
                self.seconds[each.name] = time.perf_counter() - self._began
                self._say(f"built {each.name}, {self.seconds[each.name]:.0f} s")

    def _fail(self, name: str, error: Exception) -> None:
        lines = [line for line in str(error).splitlines() if "error" in line.lower()]
        self.failed[name] = (lines or [str(error).split("\n")[0]])[0][:300]
        self._say(f"cannot build {name}: {self.failed[name]}")

    def _say(self, line: str) -> None:
        done = len(self.cached) + len(self.seconds) + len(self.failed)
        self._report(f"{line} ({done} of {len(self._modules)})")


def is_built(module: Module) -> bool:
    """Whether the library of a module exists."""
    return bool(module.is_aot) or Path(module.jit_library_path).exists()


def build_side_by_side(modules: Sequence[Module]) -> None:
    """FlashInfer's own build of several modules. Raises what its compiler raises."""
    importlib.import_module("flashinfer.jit.core").build_jit_specs(modules)
