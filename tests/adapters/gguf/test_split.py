"""Models in several GGUF files, as llama-gguf-split writes them."""

from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Kind

from adapters.gguf.file import GgufFile
from engine.errors import StartupError
from engine.files import split_files
from gateway.commands.models import models_in
from gateway.serve.memory import weight_bytes
from gateway.serve.saved import model_facts
from gateway.settings.settings import load
from tests.adapters.gguf.test_logits import TOKENS, found
from tests.models.gguf_files import Gguf
from tests.models.loras import logits_of


@pytest.mark.parametrize(
    ("variant", "kind"), [("llama", Kind.F32), ("llama", Kind.BF16), ("mixtral", Kind.F32)]
)
def test_all_files_of_a_model_are_read(tmp_path: Path, variant: str, kind: Kind) -> None:
    model = Gguf(variant, kind, tensors_of_a_file=9).write(tmp_path / "model.gguf")
    first, *others = sorted(tmp_path.iterdir())
    assert len(others) > 1
    assert split_files(first) == [first, *others]
    assert (found(first, weights="float32") - logits_of(model, TOKENS)).abs().max() < 1e-4


def test_what_counts_bytes_counts_all_files(tmp_path: Path) -> None:
    Gguf("llama", tensors_of_a_file=9).write(tmp_path / "model.gguf")
    first, *others = sorted(tmp_path.iterdir())
    size = sum(each.stat().st_size for each in (first, *others))
    (whole := tmp_path / "whole").mkdir()
    Gguf("llama").write(whole / "model.gguf")
    weights = weight_bytes(load({"model": str(whole / "model.gguf")}))
    assert weight_bytes(load({"model": str(first)})) == weights
    assert (str(first), size) in [(each.name, each.num_bytes) for each in models_in(tmp_path)]
    facts = model_facts(first)
    others[-1].write_bytes(others[-1].read_bytes() + bytes(32))
    assert model_facts(first) != facts


def test_a_file_that_is_not_the_first_or_not_whole_is_refused(tmp_path: Path) -> None:
    Gguf("llama", tensors_of_a_file=9).write(tmp_path / "model.gguf")
    first, second, *_, last = sorted(tmp_path.iterdir())
    count = len(split_files(first))
    named = rf"of a model's {count} files; .* -00001-of-0000{count}"
    with pytest.raises(StartupError, match=f"this is number 2 {named}"):
        GgufFile(second.rename(tmp_path / "renamed.gguf"))
    with pytest.raises(StartupError, match=f"this is number 1 {named}"):
        GgufFile(first.rename(tmp_path / "renamed.gguf"))
    first = (tmp_path / "renamed.gguf").rename(first)
    with pytest.raises(StartupError, match=f"{second.name} cannot be read: .*No such file"):
        GgufFile(first)
    second.write_bytes(last.read_bytes())
    with pytest.raises(StartupError, match=f"{second.name}: .* number {count} {named}"):
        GgufFile(first)
