from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.worker.process.driving import Driver, load_worker
from tests.engine.worker.process.fleet import fleet
from tests.models.checkpoints import make_checkpoint

TOKENS = [5, 80, 3, 3, 41, 17, 9, 60, 22, 71, 11]


def fuse(directory: Path) -> None:
    """Write the experts as `gate_up_proj` and `down_proj` of `[experts, out, in]`."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    roots = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for root in roots:
        at = f"{root}.experts"
        experts = [
            [tensors.pop(f"{at}.{e}.{name}_proj.weight") for name in ("gate", "up", "down")]
            for e in range(8)
        ]
        tensors[f"{at}.gate_up_proj"] = torch.stack([torch.cat(each[:2]) for each in experts])
        tensors[f"{at}.down_proj"] = torch.stack([each[2] for each in experts])
    save_file(tensors, path)


@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_5_moe"])
def test_fused_experts_are_read_as_separate_ones(tmp_path: Path, variant: str) -> None:
    make_checkpoint(tmp_path, variant)
    expected = Driver(load_worker(tmp_path, attention="cpu")).logits((0, TOKENS))
    fuse(tmp_path)
    assert torch.equal(Driver(load_worker(tmp_path, attention="cpu")).logits((0, TOKENS)), expected)
    with fleet(tmp_path, 1, 2, attention="cpu") as workers:
        found = Driver(workers).logits((0, TOKENS))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
