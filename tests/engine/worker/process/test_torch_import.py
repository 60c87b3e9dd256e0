import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from engine.worker.process import torch_import


def test_nothing_is_left_out_beside_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia = tmp_path / "nvidiactl"
    nvidia.touch()
    monkeypatch.setattr(torch_import, "NVIDIA", nvidia)
    monkeypatch.setattr(sys, "modules", {})
    monkeypatch.setattr(sys, "meta_path", [])
    torch_import.skip_meta_registrations()
    torch_import.skip_scipy()
    torch_import.import_unused_later()
    assert (sys.modules, sys.meta_path) == ({}, [])


def test_torch_still_has_the_module_that_is_left_out() -> None:
    """A version of torch without it would import something else."""
    assert find_spec(torch_import.META_REGISTRATIONS) is not None


WITHOUT_SCIPY = """
import sys
from pathlib import Path
from engine.worker.process import torch_import
torch_import.NVIDIA = Path({nvidia!r})
torch_import.skip_scipy()
import numba, numba.np.arraymath
print(sys.modules.get("scipy"))
"""


def test_numba_is_imported_without_scipy(tmp_path: Path) -> None:
    program = WITHOUT_SCIPY.format(nvidia=str(tmp_path / "none"))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "None\n", ran.stderr


LATER = """
import sys
from pathlib import Path
from engine.worker.process import torch_import
torch_import.NVIDIA = Path({nvidia!r})
torch_import.skip_meta_registrations()
torch_import.import_unused_later()
import torch
unused = [name for name in torch_import.UNUSED if "Later" in type(sys.modules[name]).__name__]
assert unused == list(torch_import.UNUSED), unused
from torch.distributions import Normal
assert issubclass(torch.optim.SGD, torch.optim.Optimizer)
from torch.export.graph_signature import InputKind  # a module that is imported later
assert type(torch.export) is type(sys)
assert not hasattr(torch.func, "any")
for name in torch_import.UNUSED:
    hasattr(sys.modules[name], "any")
    assert type(sys.modules[name]) is type(sys), name
doubled = torch.vmap(lambda row: row + row)(torch.ones(2, 1)).tolist()
print(Normal(0.0, 1.0).mean, type(torch.optim).__name__, InputKind.PARAMETER.name, doubled)
"""


def test_unused_modules_of_torch_are_imported_when_they_are_used(tmp_path: Path) -> None:
    program = LATER.format(nvidia=str(tmp_path / "none"))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "tensor(0.) module PARAMETER [[2.0], [2.0]]\n", ran.stderr


WORKER = """
import sys
from pathlib import Path
from engine.worker.process import torch_import
torch_import.NVIDIA = Path({nvidia!r})
torch_import.skip_meta_registrations()
torch_import.import_unused_later()
from engine.worker.cpu.placeholders import COMPILER, stand_in
stand_in(*COMPILER)
import engine.worker.process.worker, engine.worker.cpu.device, adapters.models.dense.llama
import torch
with torch.inference_mode():  # torch's C++ reads attributes of modules, too
    x = torch.empty(()).expand([2, 3]).contiguous().view(3, 2)[:, 0].to(torch.float16)
    torch.cat([x, x]).split([2, 4])
from engine.worker.cpu.recorded_decoder import TorchWatch
x = torch.randn(3, 4)
assert torch.nn.functional.linear(x, x).softmax(dim=1).sum().round() == 3
with TorchWatch() as watch:
    (torch.ones(2) + 1).view(2, 1)
assert watch.operations == ["ones", "add"]
assert "torch._dynamo" not in sys.modules  # the compiler of torch
assert not hasattr(sys.modules["torch._meta_registrations"], "meta_mm")
ran = [name for name in torch_import.UNUSED if type(sys.modules[name]) is type(sys)]
print(ran, sys.modules.keys() & {{"torch.testing._internal", "torch._export", "sympy"}})
"""


def test_a_worker_runs_none_of_the_unused_modules(tmp_path: Path) -> None:
    program = WORKER.format(nvidia=str(tmp_path / "none"))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "[] set()\n", ran.stderr


def test_of_another_version_of_torch_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_import, "NVIDIA", Path("/nowhere"))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = len(sys.meta_path)
    for tested, more in (("2.12.", 0), (".".join(torch.__version__.split(".")[:2]), 1)):
        monkeypatch.setattr(torch_import, "TESTED", tested)
        torch_import.import_unused_later()
        assert len(sys.meta_path) == before + more
