"""The port for what proposes drafts in the worker."""

from typing import Protocol

from torch import Tensor

from engine.step import Step
from engine.worker.process.stage_kv import StageKV
from engine.worker.sampling.logits_output import LogitsOutput


class Drafter(Protocol):
    """Proposes tokens that may follow those of a step."""

    @property
    def reads_hidden(self) -> bool:
        """Whether it needs the hidden states of all rows, behind the model's last layer."""
        ...

    def propose(
        self, step: Step, output: LogitsOutput, hidden: Tensor | None
    ) -> tuple[tuple[int, ...], ...]:
        """The proposals of each entry of `step` with a `ProposalSpec`. `output` has its tokens."""
        ...


class LoadedDrafter(Protocol):
    """The weights of what proposes drafts; its KV cache is allocated once its size is known."""

    @property
    def kv(self) -> StageKV: ...

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights, about."""
        ...

    @property
    def num_parameters(self) -> int: ...

    def open(self, num_blocks: int) -> Drafter:
        """The drafter over a KV cache of so many blocks."""
        ...
