import pytest

from gateway.serve import load as loading
from gateway.settings.settings import load


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 1), ("cpu", 0), ("auto", 0)])
def test_workers_reserve_a_gpu_with_device_cuda_only(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int
) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(loading, "resolve_name", lambda name: lambda *given: made.append(given))
    settings = load({"launcher": "ray", "device": device, "threads": "3"})
    loading._launcher(settings, "module:Worker")
    assert made == [("module:Worker", settings.launch.ray_address, 3, gpus)]
