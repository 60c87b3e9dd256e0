"""What decoders that read images add to decoders of text; config.json describes both parts."""

from collections.abc import Mapping

from adapters.models.base.fields import Fields
from adapters.models.base.rope_fields import LayerRopes, with_axes
from adapters.models.base.rotary import RotaryFamily
from adapters.models.encoders.qwen_vision import QwenVision, VisionShape
from engine.errors import StartupError
from engine.worker.ports import ModelShape, Operators, WeightSource


def vision_fields(config: Mapping[str, object]) -> Fields:
    """The part of config.json that describes the encoder. Raises `StartupError` without it."""
    vision = Fields(config).child("vision_config")
    if vision is None:
        raise StartupError("config.json: vision_config is missing")
    return vision


class ReadsImages(RotaryFamily):
    """Goes before the family of the text model among a class's bases."""

    roots: tuple[str, ...] = ("model.language_model", "model")
    encoder_roots: tuple[str, ...]
    encoder_tensor: str  # one that every encoder has, behind the root

    def text_config(self, config: Mapping[str, object]) -> Mapping[str, object]:
        """`text_config`, where `tie_word_embeddings` may be missing."""
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise StartupError(f"config.json: text_config is {text!r}, expected an object")
        return super().text_config(
            {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}
        )

    def encoder_root(self, weights: WeightSource) -> str:
        """The first of `encoder_roots` that the checkpoint has."""
        has = [each for each in self.encoder_roots if weights.has(each + self.encoder_tensor)]
        return (*has, self.encoder_roots[0])[0]


class HasImageAxes(ReadsImages):
    """The tokens of Qwen's images have positions along three axes (M-RoPE)."""

    encoder_roots = ("model.visual.", "visual.")
    encoder_tensor = "patch_embed.proj.weight"

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        ropes = super().ropes(fields, shape)
        rope = fields.child("rope_parameters") or fields.child("rope_scaling") or fields
        return ropes._replace(sources=tuple(with_axes(each, rope) for each in ropes.sources))


class ReadsQwenImages(HasImageAxes):
    """The vision transformer since Qwen 3."""

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(config)
        self._vision = VisionShape.read(vision_fields(config), self.shape.hidden_size)
        self.encoder = self._vision.report

    def build_encoder(self, weights: WeightSource, operators: Operators) -> QwenVision:
        return QwenVision(weights, operators, self._vision, self.encoder_root(weights))
