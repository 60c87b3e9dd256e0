"""SmolVLM2: Llama behind SigLIP, which reads an image in square tiles."""

from collections.abc import Mapping

from adapters.models.base.fields import Fields
from adapters.models.dense.llama import Llama
from adapters.models.encoders.siglip import Siglip, SiglipShape
from adapters.models.encoders.vision_transformer import text_fields, vision_fields
from engine.worker.ports import Operators, WeightSource


class SmolVLM(Llama):
    """`SmolVLMForConditionalGeneration`. One token stands for `scale_factor` × `scale_factor`
    patches."""

    ignored_weights = (*Llama.ignored_weights, "model.vision_model.*", "model.connector.*")
    roots = ("model.text_model", "model")
    encoder_root = "model.vision_model."

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(config)
        block = Fields(config).integer("scale_factor", 2)
        self._vision = SiglipShape.read(vision_fields(config), block, self.shape.hidden_size)
        self.encoder = self._vision.report

    def text_config(self, config: Mapping[str, object]) -> Mapping[str, object]:
        return text_fields(config)

    def build_encoder(self, weights: WeightSource, operators: Operators) -> Siglip:
        projection = "model.connector.modality_projection.proj"
        return Siglip(weights, operators, self._vision, self.encoder_root, projection)
