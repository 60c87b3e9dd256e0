from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapters.attention.reference import ReferenceAttention
from adapters.models import FAMILIES
from adapters.models.checkpoint import read_config
from engine.step import RequestId, Step, StepEntry, StepId
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.kv.kv_tensors import allocate
from engine.worker.model.layers import Mlp
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.model.stage import Stage
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import AttentionSpec, ModelFamily, RaggedLayout, Shard
from engine.worker.weights.checkpoint_files import SafetensorsFiles
from engine.worker.weights.source import Weights
from tests.models.checkpoints import make_checkpoint

LAYERS = 3


def open_family(config: Mapping[str, object]) -> ModelFamily:
    names = config["architectures"]
    assert isinstance(names, list)
    module, name = FAMILIES[names[0]].split(":")
    family: ModelFamily = getattr(import_module(module), name)(config)
    return family


def make_stage(directory: Path, span: range) -> tuple[Stage, Weights]:
    family = open_family(read_config(directory))
    shape = family.shape
    weights = Weights(SafetensorsFiles(directory), torch.float32, lambda *_: None)
    cache = allocate(shape, len(span), 16, 4, torch.float32)
    spec = AttentionSpec(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5, None
    )
    model = family.build(weights, Shard(shape, span), TorchOperators())
    return Stage(model, ReferenceAttention(spec, cache, NativeThreadPool(1))), weights


def layout(num_tokens: int) -> RaggedLayout:
    blocks = b"".join(i.to_bytes(4, "little") for i in range(8))
    entry = StepEntry(RequestId(0), 0, tuple(range(5, 5 + num_tokens)), blocks, None)
    return build_layout(Step(StepId(0), (entry,)), LayoutLimits(97, 128, 16, 4))


def test_a_stage_loads_only_its_share_of_the_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    _, whole = make_stage(tmp_path, range(LAYERS))
    shares = [make_stage(tmp_path, range(i, i + 1))[1] for i in range(LAYERS)]
    assert sum(share.num_loaded for share in shares) == whole.num_loaded


def test_logits_are_computed_for_sampled_rows_only(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    stage, _ = make_stage(tmp_path, range(LAYERS))
    with torch.inference_mode():
        logits = stage.logits(layout(11))
    assert logits is not None
    assert logits.shape == (0, 97)


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_the_last_layer_computes_one_row_of_a_piece_and_the_kv_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    make_checkpoint(tmp_path, variant)
    rows_of_outputs: list[int] = []
    apply = Mlp.__call__

    def counted(mlp: Mlp, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        rows_of_outputs.append(len(x))
        return apply(mlp, x, add_to)

    monkeypatch.setattr(Mlp, "__call__", counted)
    stages = [make_stage(tmp_path, range(LAYERS))[0] for _ in range(2)]
    with torch.inference_mode():
        assert stages[0].read(layout(11)).shape[0] == 0
        stages[1].run(layout(11))
    assert rows_of_outputs == [11, 11, 1, 11, 11, 11]
    of_pieces, of_all = (stage.attention for stage in stages)
    assert isinstance(of_pieces, ReferenceAttention)
    assert isinstance(of_all, ReferenceAttention)
    for one, other in zip(of_pieces._cache.keys, of_all._cache.keys, strict=True):
        assert torch.equal(one, other)
