from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

import adapters.attention
from adapters.attention.reference import ReferenceAttention
from engine.media import EntryMedia, ImageRows
from engine.step import RequestId, Step, StepEntry, StepId
from engine.worker.device import Device
from engine.worker.model.kv.kv_tensors import allocate
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.ports import (
    AttentionBackend,
    AttentionSpec,
    CapturableAttention,
    KVTensors,
    MakesAttention,
    ModelShape,
    RaggedLayout,
)
from engine.worker.process.attention_choice import StageAttention
from tests.engine.worker.cuda.launching import CapturableReference

SHAPE = ModelShape(1, 4, 2, 16, 1, 1, 1, 1, 64)
SPEC = AttentionSpec(4, 2, 16, 0.25, None, sees_images=True)


class Causal(CapturableReference):
    """A backend that can be captured and only looks back."""

    num_steps = 0

    @staticmethod
    def why_not(spec: AttentionSpec, kv_dtype: torch.dtype, block_size: int) -> str:
        return "attention in both directions is not supported" if spec.sees_images else ""

    def plan(self, layout: RaggedLayout) -> None:
        Causal.num_steps += 1
        super().plan(layout)


class Bench:
    """Two caches of equal contents, with the attention of a device and the plain one."""

    def __init__(self) -> None:
        def backend(makes: MakesAttention, spec: AttentionSpec, cache: KVTensors) -> object:
            return makes(spec, cache, None)  # type: ignore[arg-type]

        device = SimpleNamespace(
            attentions=("causal", "reference"),
            formats=SimpleNamespace(kv_dtype=torch.float32),
            backend=backend,
        )
        stage = StageAttention(cast(Device, device), (SPEC,), 4)
        assert stage.names == "causal"
        caches = [allocate(SHAPE, 1, 8, 4, torch.float32) for _ in range(2)]
        self.chosen = stage.over(caches[0])
        self.plain = ReferenceAttention(SPEC, caches[1], None)  # type: ignore[arg-type]

    def layout(self, start: int, count: int, media: EntryMedia | None = None) -> RaggedLayout:
        blocks = np.arange(8, dtype="<i4").tobytes()
        entry = StepEntry(RequestId(0), start, (0,) * count, blocks, None, media=media)
        return build_layout(Step(StepId(0), (entry,)), LayoutLimits(1, 64, 8, 4))

    def both(self, count: int) -> list[Tensor]:
        """The results of both for the same inputs."""
        qkv = torch.randn(count, 8, 16, generator=torch.Generator().manual_seed(count))
        attentions: tuple[AttentionBackend, ...] = (self.chosen, self.plain)
        q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
        return [each.run(0, q, k, v, None) for each in attentions]


def test_steps_with_images_are_computed_by_the_plain_backend_where_the_chosen_one_looks_back_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(adapters.attention.BACKENDS, "causal", f"{__name__}:Causal")
    monkeypatch.setattr(Causal, "num_steps", 0)
    bench = Bench()
    steps = ((0, 12, EntryMedia((ImageRows(1, 2, 0, 8),)), 0), (12, 5, None, 1), (17, 1, None, 2))
    for start, count, media, num_steps in steps:
        layout = bench.layout(start, count, media)
        bench.chosen.plan(layout)
        bench.plain.plan(layout)
        torch.testing.assert_close(*bench.both(count), rtol=0, atol=0)
        assert Causal.num_steps == num_steps
    layout = bench.layout(18, 1)
    assert isinstance(bench.chosen, CapturableAttention)
    assert bench.chosen.plan_captured(layout) == (1, 1)
    bench.plain.plan(layout)
    torch.testing.assert_close(*bench.both(1), rtol=0, atol=0)
