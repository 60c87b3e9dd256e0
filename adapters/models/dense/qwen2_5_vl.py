"""Qwen2.5-VL: Qwen 2.5 with positions along three axes, and an image encoder with windows."""

from collections.abc import Mapping

from adapters.models.dense.qwen import Qwen2
from adapters.models.encoders.families import HasImageAxes, vision_fields
from adapters.models.encoders.qwen2_5_vision import Qwen25Vision, WindowedShape
from engine.worker.ports import Operators, WeightSource


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
