"""The image encoder of Qwen2.5-VL: RMS norms, gated MLPs, and attention within windows of the image
in all but a few layers. The tokens of a window are computed one after the other."""

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
from adapters.models.encoders.vision_transformer import VisionLayer, VisionReader
from engine.errors import StartupError
from engine.media import EncoderReport
from engine.worker.ports import (
    EncoderPixels,
    EncoderState,
    Operators,
    RopeAngles,
    WeightSource,
)


@dataclass(frozen=True, slots=True)
class WindowedShape:
    """What `vision_config` has."""

    tower: TowerShape
    activation: str
    side: int  # a window's width and height, in tokens
    full: frozenset[int]  # the layers with attention to the whole image

    @classmethod
    def read(cls, fields: Fields, hidden_size: int) -> "WindowedShape":
        """Raises `StartupError` for a field that is not supported."""
        tower = TowerShape.read(fields, hidden_size, patch=14)
        pixels, full = fields.integer("window_size", 112), fields.get("fullatt_block_indexes")
        if full is not None and not isinstance(full, list):
            raise StartupError(f"{fields.where}: fullatt_block_indexes={full!r}, expected layers")
        layers = [7, 15, 23, 31] if full is None else full
        side = pixels // tower.merge // tower.patch
        if not side:
            raise StartupError(
                f"{fields.where}: window_size={pixels} pixels are less than a token's "
                f"{tower.merge * tower.patch}"
            )
        activation = fields.activation("hidden_act", "silu")
        if full is not None:
            fields.counts("fullatt_block_indexes", len(full))
        return cls(tower, activation, side, frozenset(layers))

    @property
    def report(self) -> EncoderReport:
        """What the control plane knows of it."""
        return self.tower.report(0, num_matrices=3)


class Qwen25Vision(QwenTower):
    """Built from the tensors that begin with `root`."""

    def __init__(
        self, weights: WeightSource, operators: Operators, shape: WindowedShape, root: str
    ) -> None:
        reader, tower = VisionReader(weights, operators, root), shape.tower
        self._side = shape.side
        parts = TowerParts(
            [_layer(reader, shape, number) for number in range(tower.num_layers)],
            reader.patches("patch_embed.proj", tower.kernel, has_bias=False),
            {LAST: _merger(reader, tower)},
        )
        super().__init__(operators, tower, parts)

    def begin(self, pixels: EncoderPixels, grid: tuple[int, int, int]) -> EncoderState:
        """The patches of a window follow one another."""
        state, block, merge = super().begin(pixels, grid), self._shape.block, self._shape.merge
        order, sizes = _windows(grid[1] // merge, grid[2] // merge, self._side)
        order = order.to(pixels.levels.device)
        patches = (order[:, None] * block + torch.arange(block, device=order.device)).flatten()
        assert state.angles is not None, "it has RoPE"
        state.pixels, state.order = pixels._replace(levels=pixels.levels[patches]), order
        state.angles = RopeAngles(state.angles.cos[patches], state.angles.sin[patches])
        state.window_ends = (sizes * block).cumsum(0).tolist()
        return state

    def tokens(self, state: EncoderState, rows: slice) -> Tensor:
        assert state.order is not None, "`begin` has set it"
        return state.order[rows.start // self._shape.block : rows.stop // self._shape.block]


def _layer(reader: VisionReader, shape: WindowedShape, number: int) -> VisionLayer:
    at, width, inner = f"blocks.{number}.", shape.tower.width, shape.tower.inner
    return VisionLayer(
        reader.rms_norm(f"{at}norm1", width, EPS),
        reader.linear(f"{at}attn.qkv", 3 * width, width),
        reader.linear(f"{at}attn.proj", width, width),
        reader.rms_norm(f"{at}norm2", width, EPS),
        reader.linear([f"{at}mlp.gate_proj", f"{at}mlp.up_proj"], inner, width),
        reader.linear(f"{at}mlp.down_proj", width, inner),
        reader.operators.activation(shape.activation, is_gated=True),
        is_windowed=number not in shape.full,
    )


def _merger(reader: VisionReader, shape: TowerShape) -> Merger:
    width = shape.width * shape.block
    return Merger(
        reader.rms_norm("merger.ln_q", shape.width, EPS),
        reader.linear("merger.mlp.0", width, width),
        reader.linear("merger.mlp.2", shape.out_width, width),
        width,
    )


def _windows(height: int, width: int, side: int) -> tuple[Tensor, Tensor]:
    """The tokens in the order of windows, and how many each window has. Windows at the right and
    the lower edge may be smaller."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    window = (rows // side * -(-width // side) + columns // side).flatten()
    return window.argsort(stable=True), window.bincount()
