"""Qwen3-VL: Qwen 3 with positions along three axes, behind Qwen's vision transformer, of which some
layers' results are added behind the decoder's first layers (DeepStack)."""

from adapters.models.dense.qwen import Qwen3
from adapters.models.encoders.families import ReadsQwenImages
from engine.errors import StartupError
from engine.worker.model.layers import Decoder
from engine.worker.ports import Operators, Shard, WeightSource


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
