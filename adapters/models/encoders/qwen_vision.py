"""The image encoder of Qwen3-VL, Qwen 3.5 and 3.6: learned positions, resampled to the image's
grid. With DeepStack some layers' results are merged too, and added behind the decoder's first
layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.models.base.fields import Fields
from adapters.models.encoders.qwen_tower import (
    EPS,
    LAST,
    Merger,
    QwenTower,
    TowerParts,
    TowerShape,
)
from adapters.models.encoders.vision_transformer import VisionLayer, VisionReader, places
from engine.errors import StartupError
from engine.media import EncoderReport
from engine.worker.ports import EncoderState, Operators, WeightSource


@dataclass(frozen=True, slots=True)
class VisionShape:
    """What `vision_config` has."""

    tower: TowerShape
    activation: str
    positions: int  # along each side of the learned grid
    added: tuple[int, ...] = ()  # layers whose results are added behind the decoder's first ones

    @classmethod
    def read(cls, fields: Fields, hidden_size: int) -> "VisionShape":
        """Raises `StartupError` for a field that is not supported."""
        num_positions = fields.integer("num_position_embeddings", 2304)
        shape = cls(
            tower=TowerShape.read(fields, hidden_size),
            activation=fields.activation("hidden_act", "gelu_pytorch_tanh"),
            positions=int(num_positions**0.5),
            added=_indexes(fields),
        )
        if shape.positions**2 != num_positions:
            raise StartupError(
                f"{fields.where}: num_position_embeddings={num_positions} is not a square"
            )
        return shape

    @property
    def report(self) -> EncoderReport:
        """What the control plane knows of it."""
        return self.tower.report(len(self.added), num_matrices=2)


def _indexes(fields: Fields) -> tuple[int, ...]:
    """`deepstack_visual_indexes`, ascending layers."""
    found = fields.get("deepstack_visual_indexes")
    if found is None:
        return ()
    if not isinstance(found, list) or found != sorted(set(found)):
        raise StartupError(
            f"{fields.where}: deepstack_visual_indexes={found!r}, expected ascending layers"
        )
    return fields.counts("deepstack_visual_indexes", len(found))


class QwenVision(QwenTower):
    """Built from the tensors that begin with `root`."""

    def __init__(
        self, weights: WeightSource, operators: Operators, shape: VisionShape, root: str
    ) -> None:
        reader, tower = VisionReader(weights, operators, root), shape.tower
        parts = TowerParts(
            [_layer(reader, shape, f"blocks.{n}.") for n in range(tower.num_layers)],
            reader.patches("patch_embed.proj", tower.kernel),
            {
                layer: _merger(reader, tower, f"deepstack_merger_list.{at}.", is_merged_first=True)
                for at, layer in enumerate(shape.added)
            }
            | {LAST: _merger(reader, tower, "merger.", is_merged_first=False)},
        )
        super().__init__(operators, tower, parts)
        self._side = shape.positions
        self._positions = reader.tensor("pos_embed.weight", shape.positions**2, tower.width)

    def embed(self, state: EncoderState, rows: slice) -> Tensor:
        size = state.grid[1], state.grid[2]
        down, across = (each[rows] for each in places(*size, self._shape.merge))
        taps, shares = _resampled(down, across, size, self._side)
        learned = self._positions[taps.to(state.hidden.device)].float()
        learned = (learned * shares.to(state.hidden.device)[:, :, None]).sum(1)
        hidden = super().embed(state, rows)
        return hidden + learned.to(hidden.dtype)


def _layer(reader: VisionReader, shape: VisionShape, at: str) -> VisionLayer:
    width, inner = shape.tower.width, shape.tower.inner
    return VisionLayer(
        reader.norm(f"{at}norm1", width, EPS),
        reader.linear(f"{at}attn.qkv", 3 * width, width),
        reader.linear(f"{at}attn.proj", width, width),
        reader.norm(f"{at}norm2", width, EPS),
        reader.linear(f"{at}mlp.linear_fc1", inner, width),
        reader.linear(f"{at}mlp.linear_fc2", width, inner),
        reader.operators.activation(shape.activation, is_gated=False),
    )


def _merger(reader: VisionReader, shape: TowerShape, at: str, *, is_merged_first: bool) -> Merger:
    width = shape.width * shape.block
    return Merger(
        reader.norm(f"{at}norm", width if is_merged_first else shape.width, EPS),
        reader.linear(f"{at}linear_fc1", width, width),
        reader.linear(f"{at}linear_fc2", shape.out_width, width),
        width,
        is_merged_first,
    )


def _resampled(
    rows: Tensor, columns: Tensor, size: tuple[int, int], side: int
) -> tuple[Tensor, Tensor]:
    """The four places of a square grid with `side` places along each side that are mixed for each
    patch, and their shares: bilinear interpolation in which the corners are the grid's own."""

    def along(places: Tensor, count: int) -> tuple[Tensor, Tensor]:
        at = places.float() * (side - 1) / max(count - 1, 1)
        floor = at.floor()
        taps = floor.long()[:, None] + torch.arange(2)
        distances = (at[:, None] - floor[:, None] - torch.arange(2)).abs()
        return taps.clamp(0, side - 1), (1 - distances).clamp(min=0)

    (down, down_shares), (across, across_shares) = along(rows, size[0]), along(columns, size[1])
    places = (down[:, :, None] * side + across[:, None, :]).flatten(1)
    return places, (down_shares[:, :, None] * across_shares[:, None, :]).flatten(1)
