"""The config.json fields of well-known models, for checkpoints with random weights."""

from collections.abc import Mapping

from adapters.models.named_shapes import dense, gemma, hybrid, mixtures
from adapters.models.named_shapes.llama_like import Config

SHAPES: Mapping[str, Config] = {
    **dense.SHAPES,
    **gemma.SHAPES,
    **hybrid.SHAPES,
    **mixtures.SHAPES,
}
