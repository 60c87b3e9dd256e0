"""Qwen2.5-VL and Qwen3-VL: Qwen 2.5 and 3 with positions along three axes, behind an image encoder:
one with windows, and one of which some layers' results are added behind the decoder's first layers
(DeepStack)."""

from collections.abc import Mapping

from adapters.models.dense.qwen import Qwen2, Qwen3
from adapters.models.encoders.families import HasImageAxes, ReadsQwenImages, vision_fields
from adapters.models.encoders.qwen2_5_vision import Qwen25Vision, WindowedShape
from engine.errors import StartupError
from engine.worker.model.layers import Decoder
from engine.worker.ports import Operators, Shard, WeightSource


class Qwen25VL(HasImageAxes, Qwen2):
    """`Qwen2_5_VLForConditionalGeneration`."""

    ignored_weights = (*Qwen2.ignored_weights, "visual.*", "model.visual.*")

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(config)
        self._vision = WindowedShape.read(vision_fields(config), self.shape.hidden_size)
        self.encoder = self._vision.report

    def text_config(self, config: Mapping[str, object]) -> Mapping[str, object]:
        """Published checkpoints have the fields of the decoder beside `vision_config`."""
        return super().text_config(config) if "text_config" in config else config

    def build_encoder(self, weights: WeightSource, operators: Operators) -> Qwen25Vision:
        return Qwen25Vision(weights, operators, self._vision, self.encoder_root(weights))


class Qwen3VL(ReadsQwenImages, Qwen3):
    """`Qwen3VLForConditionalGeneration`."""

    ignored_weights = (*Qwen3.ignored_weights, "model.visual.*")

    def build(self, weights: WeightSource, shard: Shard, operators: Operators) -> Decoder:
        num_added = len(self._vision.added)
        if shard.is_first and len(shard.span) <= num_added:
            raise StartupError(
                f"results of the image encoder are added behind the first {num_added} layers; the "
                f"first stage has {len(shard.span)}, and needs more: use fewer --pipeline-stages"
            )
        return super().build(weights, shard, operators)
