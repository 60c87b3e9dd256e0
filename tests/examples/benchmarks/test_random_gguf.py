from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from adapters.gguf.config import read_config
from adapters.gguf.file import GgufFile
from adapters.gguf.vocabulary import read_tokenizer
from adapters.models.named_shapes import SHAPES
from adapters.tokenizers import load_tokenizer
from examples.benchmarks.peers import random_gguf
from examples.benchmarks.peers.random_blocks import DEVIATION, WRITERS, random_rows
from examples.benchmarks.server import trained_vocabulary

SMALL = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 5000}
EXPERTS = ("num_experts", "num_local_experts")


@pytest.mark.parametrize("kind", WRITERS, ids=lambda kind: kind.name)
def test_random_blocks_are_weights_around_zero(kind: Kind) -> None:
    rows = random_rows(np.random.default_rng(0), kind, 64, 1024)
    weights = gguf.quants.dequantize(rows, kind)
    assert weights.shape == (64, 1024)
    assert abs(weights.mean()) < DEVIATION / 50
    assert weights.std() == pytest.approx(DEVIATION, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "format"),
    [
        ("Qwen3-4B", "q4_k_m"),
        ("Qwen3.5-4B", "q4_k_m"),
        ("Llama-3.1-8B", "q4_k_m"),
        ("Qwen3-30B-A3B", "q4_0"),
        ("gpt-oss-20b", "mxfp4"),
    ],
)
def test_a_random_file_has_the_config_of_its_shape(
    shape: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {**SHAPES[shape], **SMALL}
    monkeypatch.setattr(random_gguf, "SHAPES", {"small": wanted})
    path = tmp_path / "small.gguf"
    random_gguf.write("small", format, path)
    file = GgufFile(path)
    config = read_config(file)
    others = {"hidden_act", "rope_theta", "rope_scaling", "swiglu_limit", "num_experts"}
    same = wanted.keys() - others
    assert config.get("num_local_experts") in {wanted.get(name) for name in EXPERTS}
    assert {name: config[name] for name in same} == {name: wanted[name] for name in same}
    tokenizer = read_tokenizer(file)
    assert len(tokenizer["model"]["vocab"]) == SMALL["vocab_size"]
    assert len(tokenizer["added_tokens"]) == 2


def test_some_layers_of_q4_k_m_have_more_bits() -> None:
    config = SHAPES["Qwen3-4B"]
    kinds = {
        each.name: random_gguf.kind_of(each, config, "q4_k_m")
        for each in random_gguf.tensors(config)
    }
    assert kinds["token_embd"] is Kind.Q6_K
    assert kinds["blk.5.attn_q"] is Kind.Q4_K
    down = [kinds[f"blk.{layer}.ffn_down"] for layer in range(36)]
    assert down.count(Kind.Q6_K) == 18
    assert [layer for layer in range(8) if down[layer] is Kind.Q6_K] == [0, 1, 2, 3, 6]


def test_a_trained_vocabulary_gives_the_same_ids_from_both_kinds_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_gguf, "SHAPES", {"small": {**SHAPES["Qwen3-4B"], **SMALL}})
    random_gguf.write("small", "q8_0", tmp_path / "small.gguf")
    corpus = Path(random_gguf.__file__).read_text()
    tokenizer = trained_vocabulary.trained(iter([corpus]), 900)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "trained.gguf"
    trained_vocabulary.write_gguf(tmp_path / "small.gguf", tmp_path / "tokenizer.json", out)
    ids = tokenizer.encode(corpus).ids
    assert len(ids) < len(corpus) / 2, "it has merges"
    for checkpoint in (tmp_path, out):
        assert load_tokenizer(checkpoint).encode(corpus, add_special_tokens=False) == ids
    assert read_config(GgufFile(out))["vocab_size"] == SMALL["vocab_size"]
