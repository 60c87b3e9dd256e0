"""The states of recurrent layers: their sizes, their tensors, and which of them a step uses."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.worker.ports.layout import Int64s


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """A layer of the gated delta rule behind a short causal convolution (Gated DeltaNet).

    Its state, in float32, is a matrix `[key_dim, value_dim]` for each value head, and the last
    `kernel - 1` inputs of the convolution. Each key head serves equally many value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """The inputs of the convolution: q, k and v of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def num_elements(self) -> int:
        """Numbers in the state of one request."""
        matrices = self.num_value_heads * self.key_dim * self.value_dim
        return matrices + self.channels * (self.kernel - 1)


class RecurrentState(NamedTuple):
    """The states of one layer, for all state slots."""

    inputs: Tensor  # of the convolution, [slots, kernel - 1, channels]
    matrices: Tensor  # [slots, value_heads, key_dim, value_dim]


class StateRuns(NamedTuple):
    """The runs of a step, each of consecutive rows of one request.

    A run reads the state in its source slot (`NO_STATE`: zeros) before its first row. The state
    after row r is written to the slots `writes[r]`, as far as they are not `NO_STATE`. No run reads
    a slot that another one writes.
    """

    runs: Int64s  # [runs, 3]: first row, the row behind the last one, source slot
    writes: Int64s  # [rows, 2]


class StepStates(NamedTuple):
    """What the recurrent layers of a stage read and write in one step."""

    layers: tuple[RecurrentState, ...]
    runs: StateRuns


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a Gated DeltaNet between its linears, float32 and of one rank."""

    shape: RecurrentShape
    conv: Tensor  # [channels, kernel]
    decay_rate: Tensor  # [value_heads], negative
    decay_bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    eps: float


class DeltaNet(Protocol):
    """Convolution, gated delta rule and gated norm of one layer."""

    def __call__(self, y: Tensor, state: RecurrentState, runs: StateRuns) -> Tensor:
        """`[rows, value_heads * value_dim]` from the inputs of each row: q, k and v (`channels`),
        the gate (value_heads * value_dim), b and a (value_heads each). The result of a row has the
        same bits whatever the other rows and the number of rows of its run are, if the device
        computes linears in this way."""
        ...
