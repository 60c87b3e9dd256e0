"""Every attention backend as tests make it: those for GPUs on a stand-in of their library."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module

from torch import Tensor

from adapters.attention import BACKENDS
from adapters.attention.flashinfer import FlashInferAttention
from engine.worker.kv_tensors import KVTensors
from engine.worker.ports import AttentionSpec, MakesAttention, StepLimits, Team, Turn
from tests.flashinfer_stand_in import StandIn

LIMITS = StepLimits(max_requests=32, max_tokens=2048, max_model_len=4096)


def maker(name: str) -> MakesAttention:
    """The class of that name in the table, or what makes it on a stand-in."""
    module, _, attribute = BACKENDS[name].partition(":")
    made: MakesAttention = getattr(import_module(module), attribute)
    if isinstance(made, type) and issubclass(made, FlashInferAttention):
        return partial(_on_stand_in, made)
    return made


class OnStandIn:
    """Lets the stream catch up before a layer is run, since torch computes at once on the CPU."""

    def __init__(self, attention: FlashInferAttention, stand_in: StandIn) -> None:
        self._attention = attention
        self._stand_in = stand_in
        self.plan = attention.plan
        self.plan_captured = attention.plan_captured
        self.baked = attention.baked

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Turn | None) -> Tensor:
        """See `AttentionBackend`."""
        self._stand_in.catch_up()
        return self._attention.run(layer, q, k, v, turn)


def _on_stand_in(
    made: Callable[..., FlashInferAttention], spec: AttentionSpec, cache: KVTensors, team: Team
) -> OnStandIn:
    stand_in = StandIn()
    return OnStandIn(made(replace(spec, limits=LIMITS), cache, team, stand_in), stand_in)
