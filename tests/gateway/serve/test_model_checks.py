import subprocess
import sys
from pathlib import Path

import pytest

from adapters.gguf.blocks import FORMATS
from adapters.gguf.checks import KINDS
from adapters.gguf.floats import FLOATS
from engine.errors import StartupError
from engine.transport.process import LocalLauncher
from engine.worker.cpu.linears import FORMATS as CPU_FORMATS
from engine.worker.cpu.native_formats import DTYPES
from engine.worker.model.kv.kv_tensors import CPU_KV_DTYPES
from examples.benchmarks.server.refusals import BUILTIN, REFUSALS, Refusal
from gateway.serve import command, model_checks
from gateway.serve import load as loading
from gateway.settings import checks
from gateway.settings.settings import load

IMPORTED = """
import sys
from gateway.serve import command, model_checks
try:
    command.main(sys.argv[1:])
except command.EngineError as error:
    print(error)
print(sorted({"torch", "numpy", "gguf", "uvicorn", "transformers"} & sys.modules.keys()))
"""


@pytest.fixture(autouse=True)
def cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "has_driver", lambda: False)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_it_is_refused_before_the_server_is_imported(
    refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def served() -> None:
        raise AssertionError("the server was imported")

    monkeypatch.setattr(command, "_serve", served)
    monkeypatch.setattr(command, "_set_up_logging", lambda settings: None)
    with pytest.raises(StartupError) as refused:
        command.main(refusal.make(tmp_path))
    assert refusal.says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("flags", [[], ["--lora", "other=/no/such/folder"]])
def test_the_checks_import_neither_torch_nor_the_server(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    arguments = ["builtin", *flags] if flags else [str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTED, *arguments], capture_output=True, text=True, check=True
    )
    error, imported = ran.stdout.splitlines()
    assert error
    assert imported == "[]"


def test_formats_that_are_refused_on_a_cpu_are_those_that_it_does_not_have() -> None:
    assert checks.ON_CPU["dtype"] == DTYPES
    assert {*checks.ON_CPU["weights"], *DTYPES} == {"auto", *CPU_FORMATS}
    assert checks.ON_CPU["kv_cache_dtype"] == ("auto", *CPU_KV_DTYPES)


def test_a_gpu_that_has_no_driver_is_refused() -> None:
    with pytest.raises(StartupError, match=r"--device 'cuda' cannot be used: .*libcuda"):
        checks.check_device(load({"device": "cuda"}))


def test_types_of_tensors_in_gguf_files_are_those_that_are_read() -> None:
    assert {*FLOATS, *FORMATS} == KINDS


def test_the_built_in_model_passes() -> None:
    settings = load({"model": str(BUILTIN), "max_model_len": "32768"})
    checks.check_device(settings)
    model_checks.check_local_model(settings)


@pytest.mark.parametrize(("local", "times"), [(LocalLauncher("a:Worker"), 0), (None, 1)])
async def test_a_model_that_the_command_has_checked_is_not_read_again_for_checks(
    local: LocalLauncher | None, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []

    def next_step(role: str) -> None:
        raise StartupError(f"{role} is not read here")

    monkeypatch.setattr(loading, "check_model", lambda _, directory: checked.append(directory))
    monkeypatch.setattr(loading, "_adapter", next_step)
    with pytest.raises(StartupError, match="is not read here"):
        async with loading.load_model(load({}), lambda *_: None, local):
            pass
    assert len(checked) == times
