"""The states of recurrent layers: their sizes, their tensors, and which of them a step uses."""

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.worker.ports.layout import Int64s
from engine.worker.ports.weights import HeadTiles


class RecurrentShape(Protocol):
    """The sizes of a layer with a recurrent state, which is float32."""

    @property
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of the tensors of one request's state."""

    @property
    def parts(self) -> tuple[int, str]:
        """How many equal parts it has of which ranks can have a share, and what they are."""

    def of_rank(self, num_ranks: int) -> "RecurrentShape":
        """What one of so many ranks has of it."""


def num_elements(shape: RecurrentShape) -> int:
    """Numbers in the state of one request."""
    return sum(prod(sizes) for sizes in shape.state_sizes)


@dataclass(frozen=True, slots=True)
class ConvShape:
    """A short causal convolution of each channel, alone (LFM2). Its state is the last `kernel - 1`
    inputs."""

    channels: int
    kernel: int

    @property
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.kernel - 1, self.channels),)

    @property
    def parts(self) -> tuple[int, str]:
        return self.channels, "channels"

    def of_rank(self, num_ranks: int) -> "ConvShape":
        return replace(self, channels=self.channels // num_ranks)


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """A layer of the gated delta rule behind a short causal convolution (Gated DeltaNet).

    Its state is a matrix `[key_dim, value_dim]` for each value head, and the last
    `kernel - 1` inputs of the convolution. Each key head serves equally many value heads, which
    follow one another; with `tiles_outputs` the outputs are in the order of `HeadTiles`.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    tiles_outputs: bool = False

    @property
    def tiles(self) -> HeadTiles | None:
        """The order of the outputs' heads, if it is not that of the inputs."""
        per_key = self.num_value_heads // self.num_key_heads
        is_same = per_key == 1 or not self.tiles_outputs
        return None if is_same else HeadTiles(self.num_key_heads, per_key)

    @property
    def channels(self) -> int:
        """The inputs of the convolution: q, k and v of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        matrices = (self.num_value_heads, self.key_dim, self.value_dim)
        return ((self.kernel - 1, self.channels), matrices)

    @property
    def parts(self) -> tuple[int, str]:
        return self.num_key_heads, "key heads"

    def of_rank(self, num_ranks: int) -> "DeltaShape":
        """A rank of several has value heads that do not lie together in a tiled tensor."""
        return replace(
            self,
            num_key_heads=self.num_key_heads // num_ranks,
            num_value_heads=self.num_value_heads // num_ranks,
            tiles_outputs=self.tiles_outputs and num_ranks == 1,
        )


@dataclass(frozen=True, slots=True)
class MambaShape(DeltaShape):
    """A state space layer of Mamba 2 behind a short causal convolution.

    Its C, B and x are what q, k and v are in a linear attention (Dao & Gu, arXiv:2405.21060,
    section 7): a key head is a group, which serves equally many value heads. The state of a head
    is `[key_dim, value_dim]`. All ranks have the only group, or each has some of several.
    """

    @property
    def parts(self) -> tuple[int, str]:
        is_shared = self.num_key_heads == 1
        return (self.num_value_heads, "heads") if is_shared else (self.num_key_heads, "groups")

    def of_rank(self, num_ranks: int) -> "MambaShape":
        return replace(
            self,
            num_key_heads=max(1, self.num_key_heads // num_ranks),
            num_value_heads=self.num_value_heads // num_ranks,
        )


class StateRuns(NamedTuple):
    """The runs of a step, each of consecutive rows of one request.

    A run reads the state in its source slot (`NO_STATE`: zeros) before its first row. The state
    after row r is written to the slots `writes[r]`, as far as they are not `NO_STATE`. No run reads
    a slot that another one writes. A GPU's kernels read both `on_device`.
    """

    runs: Int64s  # [runs, 3]: first row, the row behind the last one, source slot
    writes: Int64s  # [rows, 2]
    on_device: tuple[Tensor, Tensor] | None = None  # the same numbers one after the other

    @property
    def longest(self) -> int:
        """Rows of the longest run."""
        return int((self.runs[:, 1] - self.runs[:, 0]).max(initial=0))


class StepStates(NamedTuple):
    """What the recurrent layers of a stage read and write in one step."""

    layers: tuple[tuple[Tensor, ...], ...]  # `[slots, *sizes]` each (`state_sizes`)
    runs: StateRuns


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """The weights of a short convolution between its linears, float32 and of one rank."""

    shape: ConvShape
    conv: Tensor  # [channels, kernel], the newest token's last
    conv_bias: Tensor  # [channels]


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a Gated DeltaNet between its linears, float32 and of one rank."""

    shape: DeltaShape
    conv: Tensor  # [channels, kernel]
    decay_rate: Tensor  # [value_heads], negative
    decay_bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    eps: float


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """The weights of a Mamba 2 between its linear and its norm, float32 and of one rank."""

    shape: MambaShape
    conv: Tensor  # [channels, kernel], of C, B and x in this order
    conv_bias: Tensor  # [channels]
    decay_rate: Tensor  # [value_heads], negative: A
    decay_bias: Tensor  # [value_heads], of the time steps
    skip: Tensor  # [value_heads]: D


RecurrentWeights = ConvWeights | DeltaWeights | MambaWeights


class Recurrence(Protocol):
    """What a recurrent layer computes between its linears: of a Gated DeltaNet convolution, delta
    rule and gated norm, of a Mamba convolution, recurrence and gate, of LFM2 a convolution and the
    gates around it."""

    def __call__(self, y: Tensor, state: tuple[Tensor, ...], runs: StateRuns) -> Tensor:
        """`[rows, value_heads * value_dim]` from the inputs of each row: q, k and v (`channels`),
        the gate (value_heads * value_dim), and b and a (value_heads each); of a Mamba C, B and x,
        the gate, and the time steps. Of a short convolution `[rows, channels]` from B, C and x
        (`channels` each). It may change `y`.

        `state` has the tensors of `RecurrentShape.state_sizes` for all slots. The result of a row
        has the same bits whatever the other rows and the number of rows of its run are, if the
        device computes linears in this way."""
