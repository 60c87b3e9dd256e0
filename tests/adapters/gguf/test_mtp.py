from pathlib import Path

from adapters.gguf.names import MTP, NAMES
from tests.engine.worker.process.test_mtp_head import PROMPT, Reference, Stepper, load
from tests.models.gguf_files import Gguf
from tests.models.mtp import VARIANT, mtp_layer

NUM_LAYERS = 6  # of the variant


def test_proposals_are_those_of_the_original(tmp_path: Path) -> None:
    layer, around = mtp_layer()
    tensors = {f"mtp.layers.0.{name}": each for name, each in layer.state_dict().items()} | around
    block = {f"mtp.layers.0.{name}": own for own, name in NAMES["qwen35"].block.items()}
    names = block | {name: own for own, name in MTP.items()}
    extra = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        is_norm = tensor.dim() == 1  # stored with the 1 that Hugging Face's leave out
        extra[f"blk.{NUM_LAYERS}.{names[stem]}.weight"] = tensor + 1 if is_norm else tensor
    more = {"qwen35.block_count": NUM_LAYERS + 1, "qwen35.nextn_predict_layers": 1}
    path = tmp_path / "model.gguf"
    Gguf(VARIANT, extra=extra, more=more).write(path)
    result = Stepper(load(path)).run(PROMPT, samples=True, proposes=3)
    assert result.proposals == (Reference().propose((*PROMPT, *result.tokens), 3),)
