import json
import threading
from pathlib import Path

import pytest
import torch

from adapters.images.loading import load_processor
from adapters.models import checkpoint
from adapters.models.named_shapes import SHAPES, VISION_SHAPES
from adapters.models.random_checkpoint import random_checkpoint
from adapters.tokenizers import load_token_table, load_tokenizer
from engine.errors import StartupError
from engine.worker.ports import Shard
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker_settings import Placement

PARAMETERS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-4B": 4_022_468_096,
    "Mistral-7B": 7_248_023_552,
    "Qwen3-30B-A3B": 30_532_122_624,
    "OLMoE-1B-7B": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
    "Gemma-3-270M": 268_098_176,
    "Gemma-3-1B": 999_885_952,
    "Qwen3.5-0.8B": 752_393_024,
    "Qwen3.5-4B": 4_205_751_296,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "M110": 124_668_672,
    "TINY": 4_170_048,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_every_named_shape_has_the_parameter_count_of_its_model(tmp_path: Path) -> None:
    assert PARAMETERS.keys() == SHAPES.keys()
    for name, config in SHAPES.items():
        (tmp_path / "config.json").write_text(json.dumps({**config, "random_weights": True}))
        opened = Checkpoint.open(str(tmp_path))
        weights = opened.open_weights(torch.float32, lambda *_: None)
        shard = Shard.of(opened.family.shape, Placement(), None)
        assert opened.survey(weights, shard).num_parameters == PARAMETERS[name], name


def test_ids_beyond_the_builtin_vocabulary_are_synthetic_words() -> None:
    directory = random_checkpoint("TINY")
    tokenizer = load_tokenizer(directory)
    assert tokenizer.vocab_size == 32_000
    ids = tokenizer.encode("Hello there, <|im_end|>", add_special_tokens=False)
    assert max(ids) < 2048
    assert tokenizer.token_bytes(2048) == b" w800"
    table = load_token_table(directory, tokenizer).tokens
    assert len(table) == 32_000
    for token_id in (2048, 20_000, 31_999):
        decoder = tokenizer.decoder()
        assert decoder.feed(token_id).decode() == f" w{token_id:x}"
    assert checkpoint.end_token_ids(directory) == (2043, 2041)


def test_a_shape_may_be_a_directory_with_a_config(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(
        json.dumps({**SHAPES["TINY"], "vocab_size": 2100})
    )
    directory = checkpoint.resolve_checkpoint(f"random:{tmp_path / 'mine'}")
    assert checkpoint.read_config(directory)["vocab_size"] == 2100
    assert load_tokenizer(directory).vocab_size == 2100


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "unknown shape '.*'; known: Llama-3.1-8B, .*TINY, .*and directories with"),
        ("[]", "config.json is not a JSON object"),
        ("{", "config.json is not JSON"),
        ('{"vocab_size": 300}', "vocab_size is 300, expected at least 2048"),
        ("{}", "vocab_size is None, expected at least 2048"),
    ],
)
def test_an_invalid_shape_is_rejected(tmp_path: Path, config: str | None, says: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(StartupError, match=says):
        random_checkpoint(str(tmp_path))


def test_an_unwritable_cache_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"needs a writable cache directory .*XDG_CACHE_HOME"):
        random_checkpoint("TINY", tmp_path / "file")


def test_several_processes_may_create_it_at_once(tmp_path: Path) -> None:
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(random_checkpoint("TINY", tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert len(set(made)) == 1
    assert [path.name for path in (tmp_path / "random").iterdir()] == [made[0].name]
    assert (made[0] / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", VISION_SHAPES)
def test_the_special_tokens_of_images_have_the_ids_of_the_config(name: str, tmp_path: Path) -> None:
    directory = random_checkpoint(name, tmp_path)
    processor = load_processor(directory)
    config = json.loads((directory / "config.json").read_text())
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert ids[processor.soft_token] == config["image_token_id"]
    assert {*processor.reserved} <= {*ids}
    assert (
        len({*tokenizer["model"]["vocab"].values()} | {*ids.values()})
        == (config["text_config"]["vocab_size"])
    )
    assert processor.placeholder in (directory / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("name", VISION_SHAPES)
def test_a_vision_shape_has_an_encoder(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(random_checkpoint(name, tmp_path)))
    weights = checkpoint.open_weights(torch.float32, lambda *_: None)
    checkpoint.survey(weights, Shard.whole(checkpoint.family.shape))
    assert checkpoint.encoder is not None
    assert checkpoint.encoder.num_layers == 12
