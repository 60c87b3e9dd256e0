"""Which kernels are launched before the one in front of them has ended."""

import pytest
import torch

from tests.engine.worker.cuda.kernels.interpreted import interpreted

dependent = interpreted("dependent")


@pytest.mark.parametrize(
    ("capability", "is_dependent"), [((8, 9), False), ((9, 0), True), ((12, 0), True)]
)
def test_compiled_kernels_are_launched_early_from_hopper_on(
    capability: tuple[int, int], is_dependent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dependent.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = dependent.launch_options.__wrapped__(torch.device("cuda:0"))
    assert found["IS_DEPENDENT"] is is_dependent
    assert found.get("launch_pdl", False) is is_dependent


def test_interpreted_kernels_are_not() -> None:
    for place in ("cpu", "cuda:0"):
        found = dependent.launch_options.__wrapped__(torch.device(place))
        assert found == {"IS_DEPENDENT": False}
