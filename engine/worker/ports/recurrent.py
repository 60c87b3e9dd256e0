"""The states of recurrent layers: their sizes, their tensors, and which of them a step uses."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


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

    inputs: Tensor  # of the convolution, [slots, channels, kernel - 1]
    matrices: Tensor  # [slots, value_heads, key_dim, value_dim]


class StateRun(NamedTuple):
    """Rows `[first, last)` of a step, which are consecutive tokens of one request.

    They are computed from the state in slot `source` (`NO_STATE`: zeros) to that in slot `slot`. A
    run without rows copies the state.
    """

    first: int
    last: int
    source: int
    slot: int


@dataclass(frozen=True, slots=True)
class StepStates:
    """What the recurrent layers of a stage read and write in one step.

    `decodes` are the runs of the first `len(decodes)` rows, of one row each, which are computed
    together; then come the other `runs`, in this order. `decode_slots` are the slots of the former.
    """

    layers: tuple[RecurrentState, ...]
    decodes: tuple[StateRun, ...]
    runs: tuple[StateRun, ...]
    decode_slots: Tensor  # int64
