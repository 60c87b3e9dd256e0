"""Model families and the stage models they build.

One worker holds one stage (a run of layers). Everything but attention works on
`[tokens, hidden]`, with the tokens of all requests of the step one after the other.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.worker.ports.attention import AttentionBackend, RopeAngles
from engine.worker.ports.layout import LoraSegment
from engine.worker.ports.operators import Operators
from engine.worker.ports.recurrent import StepStates
from engine.worker.ports.shapes import ModelShape
from engine.worker.ports.shard import Shard
from engine.worker.ports.weights import WeightSource


class AddedRows(NamedTuple):
    """What is added to rows of the hidden states: `values` `[len(rows), hidden]`."""

    rows: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of a stage share in one step.

    `positions` are int64 `[tokens]`; `attention` has been planned for the step. Only `rows`
    (int64, None for all) of the hidden states after the last layer are needed: the last layer
    skips what it would compute for other rows only. `ropes` is filled in by models that use RoPE:
    one set of angles for each kind of RoPE among their layers. `ids` are the token ids, int64
    `[tokens]`, on the first stage; from them models with embeddings per layer fill in
    `layer_inputs` `[tokens, layers, width]`, from the stage's first layer on. The rows of `loras`
    are computed with LoRA adapters; a captured step has `lora_slots` instead (`SlottedLoras`).
    `states` is given to models with recurrent layers. The first layers each have one of `added`,
    which is added to some of the hidden states behind the layer.
    `positions` are `[3, tokens]` where images have positions along three axes.
    """

    positions: Tensor
    attention: AttentionBackend
    rows: Tensor | None = None
    ropes: tuple[RopeAngles, ...] = ()
    ids: Tensor | None = None
    layer_inputs: Tensor | None = None
    loras: tuple[LoraSegment, ...] = ()
    lora_slots: Tensor | None = None
    states: StepStates | None = None
    added: tuple[AddedRows, ...] = ()


class StageModel(Protocol):
    """The layers of one shard. Hidden states are whole, and equal, on all ranks of a stage."""

    def embed(self, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        """Hidden states `[tokens, hidden]` of int64 `[tokens]`; only on the first stage.

        `types` are the token types of models that have them: 1 in the second text of a pair, else
        0; None: all 0.
        """

    def layers(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Hidden states `[rows, hidden]` after all layers of this stage; may overwrite `hidden`."""

    def features(self, hidden: Tensor) -> Tensor:
        """The final hidden states `[rows, hidden]` in float32, behind the model's last norm; only
        on the last stage."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, this rank's part of vocab]` in float32; only on the last stage."""


class MtpModel(Protocol):
    """The layer for multi-token prediction of a model, with the model's embedding and head.

    Its row i has the final hidden state of the model at position i, and the token at i + 1; from
    them it predicts the token at i + 2. It has attention over its own KV of positions up to i.
    """

    def layers(self, ids: Tensor, features: Tensor, context: StepContext) -> Tensor:
        """Hidden states `[context.rows, hidden]` from the next tokens, int64 `[rows]`, and
        `StageModel.features` `[rows, hidden]`."""

    def features(self, hidden: Tensor) -> Tensor:
        """What stands for the model's features when the predicted token is the next one."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab]` in float32."""


class BuildsMtp(Protocol):
    """A family whose checkpoints may have a layer for multi-token prediction."""

    def build_mtp(
        self, weights: WeightSource, shard: Shard, operators: Operators, model: StageModel
    ) -> MtpModel:
        """The layer, a shard of one layer, behind a `model` that `build` has made."""


class ModelFamily(Protocol):
    """How one architecture is read and built; made as `Family(config)` from `config.json`.

    Both steps raise `StartupError` naming the field or tensor that is not supported.
    """

    @property
    def shape(self) -> ModelShape: ...

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Shell patterns of tensors in old checkpoints that carry no information."""

    def build(self, weights: WeightSource, shard: Shard, operators: Operators) -> StageModel:
        """The layers of the shard, with the embedding on the first stage and the head on the
        last."""
