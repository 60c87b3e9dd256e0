from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from adapters.models.checkpoint import resolve_checkpoint
from engine.errors import StartupError
from engine.worker.weights.checkpoint import Checkpoint
from tests.engine.worker.process.driving import load_worker
from tests.models.gguf_files import Gguf


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"general.architecture": "mamba"}, "general.architecture 'mamba' .*known: gpt2, llama"),
        ({"split.count": 3}, "split.count"),
        ({"llama.expert_group_count": 8}, "llama.expert_group_count=8 is not supported"),
        ({"llama.rope.scaling.type": "ntk"}, "rope.scaling.type='ntk'"),
        ({"llama.rope.scaling.type": "longrope"}, "rope_factors_long.weight is missing"),
        ({"llama.attention.value_length": 4}, "value_length=4 is not supported; only 8"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count=4 is not supported"),
        ({"llama.embedding_length": "wide"}, "hidden_size is 'wide'"),
        (
            {"llama.feed_forward_length": 40},
            r"has shape \[48, 32\], but config.json implies \[40, 32\]",
        ),
    ],
)
def test_the_error_names_the_unsupported_key(
    tmp_path: Path, more: dict[str, Any], named: str
) -> None:
    path = tmp_path / "model.gguf"
    Gguf("llama", more=more).write(path)
    with pytest.raises(StartupError, match=named):
        load_worker(path)


@pytest.mark.parametrize(
    ("variant", "more", "without", "named"),
    [
        ("granite_hybrid", {"granitehybrid.ssm.inner_size": 40}, "", "40 is no multiple of 32"),
        ("granite_hybrid", {}, "granitehybrid.attention.scale", "this is Bamba, not Granite"),
        ("nemotron_h", {"nemotron_h.feed_forward_length": 48}, "", "widths of each layer"),
    ],
)
def test_other_models_with_the_architecture_of_a_hybrid_are_refused(
    tmp_path: Path, variant: str, more: dict[str, Any], without: str, named: str
) -> None:
    path = tmp_path / "model.gguf"
    Gguf(variant, more=more, without=frozenset({without})).write(path)
    with pytest.raises(StartupError, match=named):
        load_worker(path)


def test_an_unused_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    Gguf("llama", extra={"blk.0.ffn_gate_shexp.weight": torch.zeros(2, 2)}).write(path)
    with pytest.raises(
        StartupError, match=r"blk\.0\.ffn_gate_shexp\.weight .*is not used by the model"
    ):
        load_worker(path)


def test_an_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    wide = {"hidden_size": 256, "intermediate_size": 256}
    Gguf("llama", Kind.TQ2_0, changes=wide).write(path)
    with pytest.raises(StartupError, match=r"is TQ2_0, which is not supported"):
        load_worker(path)


@pytest.mark.parametrize("length", [0, 3, 23, 100, 1000, -1, -5000])
def test_a_truncated_file_is_rejected(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.gguf"
    Gguf("llama").write(path)
    content = path.read_bytes()
    path.write_bytes(content[:length])
    with pytest.raises(StartupError, match=r"model\.gguf (is not a complete GGUF|cannot be read)"):
        Checkpoint.open(str(path))


@pytest.mark.parametrize("place", [4, 8, 12, 16, 20, 24, 40])
def test_a_file_with_invalid_counts_is_rejected(tmp_path: Path, place: int) -> None:
    path = tmp_path / "model.gguf"
    Gguf("llama").write(path)
    content = bytearray(path.read_bytes())
    content[place : place + 4] = b"\xff\xff\xff\x7f"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=r"model\.gguf"):
        Checkpoint.open(str(path))


def test_a_file_of_another_format_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("hello, this is some text\n" * 9)
    with pytest.raises(StartupError, match="does not begin with GGUF"):
        Checkpoint.open(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    "names", [["tiny.gguf"], [f"q8/tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]]
)
def test_the_files_of_one_model_of_a_hub_id_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    downloaded = []

    def download(repository: str, file: str) -> str:
        assert repository == "someone/some-model"
        downloaded.append(file)
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        return str(path)

    monkeypatch.setattr("adapters.models.hub.hf_hub_download", download)
    assert resolve_checkpoint(f"someone/some-model:{names[0]}") == tmp_path / names[0]
    assert downloaded == names
