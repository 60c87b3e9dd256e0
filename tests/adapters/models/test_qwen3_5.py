from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import StartupError
from engine.worker.cpu.device import CpuDevice
from engine.worker.model.kv.kv_groups import KVGroups
from engine.worker.ports import Shard
from engine.worker.process.stage_kv import StageKV
from engine.worker.process.worker import Worker
from engine.worker.weights.checkpoint import Checkpoint
from tests.engine.worker.process.driving import Driver, load_worker, settings_for
from tests.models.checkpoints import SMALL, make_checkpoint
from tests.models.recurrent_variants import QWEN3_5
from tests.worker_settings import changed

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def test_the_text_of_a_multimodal_checkpoint_is_served(tmp_path: Path) -> None:
    config = transformers.Qwen3_5Config(text_config={**SMALL, **QWEN3_5}, vision_config=VISION)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"mtp.layers.0.mlp.up_proj.weight": torch.ones(3)}, path)
    tokens = list(range(3, 40))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    found = Driver(load_worker(tmp_path, attention="cpu")).logits((0, tokens))[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_layers_of_another_type_are_rejected(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3_5")
    path = directory / "config.json"
    path.write_text(path.read_text().replace("linear_attention", "sliding_attention", 1))
    with pytest.raises(StartupError, match="expected 6 of 'linear_attention' and 'full_attention'"):
        load_worker(directory)


def test_a_stage_without_attention_is_rejected(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3_5")
    shape, settings = Checkpoint.open(str(directory)).family.shape, settings_for(directory)
    shard = Shard(shape, range(2))  # of two recurrent layers
    kv = StageKV(CpuDevice(settings), settings, shard, KVGroups.of(shape))
    with pytest.raises(StartupError, match="layers 0 to 1 of a stage have no attention"):
        _ = kv.block_bytes


def test_too_little_memory_for_two_states_is_an_error_at_start(tmp_path: Path) -> None:
    settings = changed(
        settings_for(make_checkpoint(tmp_path, "qwen3_5")), kv_slots=0, kv_memory=1 << 12
    )
    with pytest.raises(StartupError, match="is less than 2 recurrent states"):
        Worker.load(settings, lambda *_: None)
