"""SmolVLM2: Llama behind SigLIP, which reads an image in square tiles."""

from collections.abc import Mapping

from adapters.models.base.fields import Fields
from adapters.models.dense.llama import Llama
from adapters.models.encoders.families import ReadsImages, vision_fields
from adapters.models.encoders.siglip import JoinedPatches, Siglip, SiglipShape
from engine.worker.ports import Operators, TensorSlice, WeightSource

PROJECTION = "model.connector.modality_projection.proj.weight"


class SmolVLM(ReadsImages, Llama):
    """`SmolVLMForConditionalGeneration`. One token stands for `scale_factor` × `scale_factor`
    patches."""

    ignored_weights = (*Llama.ignored_weights, "model.vision_model.*", "model.connector.*")
    roots = ("model.text_model", "model")
    encoder_roots = ("model.vision_model.",)
    encoder_tensor = "post_layernorm.weight"

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(config)
        block = Fields(config).integer("scale_factor", 2)
        self._vision = SiglipShape.read(vision_fields(config), block, self.shape.hidden_size)
        self.encoder = self._vision.report

    def build_encoder(self, weights: WeightSource, operators: Operators) -> Siglip:
        shape = self._vision
        size = (shape.out_width, shape.width * shape.block**2)
        projection = operators.linear([weights.weight(TensorSlice(PROJECTION, size))], None)
        root = self.encoder_root(weights)
        return Siglip(weights, operators, shape, root, JoinedPatches(projection))
