"""A GGUF file with its mmproj file gives the encodings and outputs of the same weights in
safetensors; files that do not fit are refused before a worker starts."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from PIL import Image

from adapters.gguf import find_mmproj
from adapters.gguf.blocks import FORMATS
from adapters.gguf.projector_tensors import JoinedTensors, ProjectorTensors
from adapters.gguf.tensors import GgufTensors
from adapters.images.loading import load_processor
from adapters.images.processor import Tile
from adapters.models.checks.checkpoint import check_checkpoint
from engine.errors import StartupError
from engine.request import RequestSpec
from engine.step import SamplingParams
from engine.worker.weights.checkpoint import Checkpoint
from examples.benchmarks.peers.random_mmproj import KINDS
from gateway.serve import model_checks
from gateway.settings.settings import load
from tests.engine.worker.process.driving import load_worker
from tests.gateway.serve.test_images import loaded, opened
from tests.inline import play
from tests.models.image_equality import encoded
from tests.models.images import Prompt, picture
from tests.models.mmproj_files import Mmproj

GREEDY = SamplingParams(temperature=0.0)
TOKENIZER = {  # of a vocabulary that a check accepts
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [chr(ord("a") + each % 26) * (1 + each // 26) for each in range(97)],
    "tokenizer.ggml.token_type": [1] * 97,
    "tokenizer.ggml.merges": [],
}
FORMS: dict[str, dict[str, Any]] = {
    "F32": {},
    "F16": {"kind": Kind.F16},
    "Q8_0": {"kind": Kind.Q8_0},
    "q, k, v": {"splits_qkv": True},
    "swapped": {"is_swapped": True},
}


@pytest.mark.parametrize(
    ("variant", "form"),
    [(variant, "F32") for variant in KINDS]
    + [("smolvlm", form) for form in [*FORMS][1:]]
    + [("qwen3_vl", form) for form in [*FORMS][3:]],
)
def test_encodings_and_outputs_are_those_of_safetensors(
    tmp_path: Path, variant: str, form: str
) -> None:
    text, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj-model.gguf"
    Mmproj(variant, **FORMS[form]).write(text, mmproj).save_pretrained(tmp_path / "whole")
    image, whole = picture(variant, 4, 6), str(tmp_path / "whole")
    expected = encoded(Checkpoint.open(whole), image)
    found = encoded(Checkpoint.open(str(text), mmproj=str(mmproj)), image)
    torch.testing.assert_close(found.embeddings, expected.embeddings, rtol=0, atol=2e-5)
    assert len(found.added) == len(expected.added)
    for one, other in zip(found.added, expected.added, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    prompt = Prompt.of([5, 6, 92], image, [93, 7, 8], picture(variant, 6, 4, 1), [9])
    spec = RequestSpec(prompt.tokens, 10, GREEDY, media=prompt.media, logprobs=0)
    (alike,) = play(load_worker(whole), [spec], max_batch_tokens=128)
    settings = {"weights": "float32", "dtype": "float32"}
    worker = load_worker(text, mmproj=str(mmproj), **settings)
    (outcome,) = play(worker, [spec], max_batch_tokens=128)
    assert outcome.error is None
    assert outcome.tokens == alike.tokens
    scores = [[each.logprob for each in one.logprobs] for one in (outcome, alike)]
    assert np.ptp(np.array(scores), axis=0).max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "encoder"), [(Kind.Q8_0, Kind.F16), (Kind.Q4_0, Kind.F16), (Kind.Q4_0, Kind.Q8_0)]
)
@pytest.mark.parametrize("variant", ["smolvlm", "qwen3_vl"])
def test_a_quantized_decoder_reads_images_too(
    tmp_path: Path, variant: str, kind: Kind, encoder: Kind
) -> None:
    text, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj-model.gguf"
    kinds = {
        f"{part}.weight": kind for part in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
    }
    files = Mmproj(variant, kind=encoder, text_kinds=kinds)
    files.write(text, mmproj).save_pretrained(tmp_path / "whole")
    prompt = Prompt.of([5, 6, 92], picture(variant, 4, 6), [93, 7, 8])
    spec = RequestSpec(prompt.tokens, 4, GREEDY, media=prompt.media, logprobs=0)
    (alike,) = play(load_worker(tmp_path / "whole"), [spec], max_batch_tokens=128)
    worker = load_worker(text, attention="cpu", mmproj=str(mmproj))
    (outcome,) = play(worker, [spec], max_batch_tokens=128)
    formats = {FORMATS[each].layout.name for each in (kind, encoder) if each in FORMATS}
    assert {*worker.report.weights.partition(" ")[0].split("+")} == formats
    assert outcome.error is None
    assert outcome.tokens == alike.tokens
    assert abs(outcome.logprobs[0].logprob - alike.logprobs[0].logprob) < 0.05


@pytest.mark.parametrize(
    ("decoder", "encoder", "floats"),
    [
        (Kind.Q8_0, Kind.F16, "float16"),
        (Kind.Q8_0, Kind.F32, None),
        (Kind.F16, Kind.F32, "float16"),
        (Kind.F32, Kind.F16, None),
    ],
)
def test_floats_of_an_encoder_stay_as_they_are_beside_a_quantized_decoder(
    tmp_path: Path,
    decoder: Kind,
    encoder: Kind,
    floats: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    Mmproj("smolvlm", kind=encoder).write(text, mmproj)
    assert ProjectorTensors(mmproj).matrix_kinds == {encoder, Kind.F32}, "some rows are too short"
    monkeypatch.setattr(ProjectorTensors, "matrix_kinds", property(lambda _: {encoder}))
    monkeypatch.setattr(GgufTensors, "matrix_kinds", property(lambda _: {decoder}))
    assert JoinedTensors(text, mmproj).preferred_format.floats == floats


@pytest.mark.parametrize("variant", KINDS)
def test_images_are_prepared_as_the_file_says(tmp_path: Path, variant: str) -> None:
    text, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    Mmproj(variant).write(text, mmproj)
    processor = load_processor(mmproj)
    pieces = processor.process(Image.new("RGB", (20, 20), (255, 0, 0)), 1000)
    tiles = [each for each in pieces if isinstance(each, Tile)]
    assert tiles
    for tile in tiles:
        rows, columns = tile.grid[1:]
        assert tile.num_tokens == rows * columns // 4
        read = [processor.values[channel, tile.levels[:, channel]] for channel in range(3)]
        assert {round(float(each), 3) for each in np.unique(read)} == {-2.0, -1.0, 1.0}


async def test_images_for_a_gguf_model_are_prepared_as_its_encoders_file_says(
    tmp_path: Path,
) -> None:
    text, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    Mmproj("smolvlm").write(text, mmproj)
    reader, _ = await opened(loaded(text, token="<image>", mmproj=mmproj))
    assert reader is not None
    assert reader.decoder.placeholder == "<image>"


def test_the_encoder_beside_a_model_is_found_if_it_belongs_to_it(tmp_path: Path) -> None:
    text, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj-F32.gguf"
    Mmproj("smolvlm").write(text, mmproj)
    assert find_mmproj(text) == mmproj
    other = tmp_path / "mmproj-other.gguf"
    Mmproj("gemma3").write(tmp_path / "gemma.gguf", other)
    assert find_mmproj(text) == mmproj
    other.write_bytes(mmproj.read_bytes())
    with pytest.raises(StartupError, match=r"mmproj-F32.gguf, mmproj-other.gguf\).*--mmproj"):
        find_mmproj(text)


@pytest.mark.parametrize(
    ("variant", "width", "named"),
    [
        ("smolvlm", 48, r"projection_dim=48 and the model's hidden_size=32 differ"),
        ("gemma3", 32, r"Gemma3.*LlamaForCausalLM \(.*projection_dim=32 and .*hidden_size=32"),
    ],
)
def test_an_encoder_beside_a_model_that_it_does_not_belong_to_is_named_before_a_worker_starts(
    tmp_path: Path, variant: str, width: int, named: str
) -> None:
    text, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj-other.gguf"
    Mmproj("smolvlm", text=TOKENIZER).write(text, tmp_path / "unused.gguf")
    more = {"clip.vision.projection_dim": width}
    Mmproj(variant, more=more).write(tmp_path / "other.gguf", mmproj)
    with pytest.raises(
        StartupError, match=rf"{text} .*mmproj-other\.gguf: .*{named}.*--mmproj off"
    ):
        model_checks.check_local_model(load({"model": str(text)}))
    model_checks.check_local_model(load({"model": str(text), "mmproj": "off"}))


SMOLVLM, QWEN = "smolvlm", "qwen3_vl"


@pytest.mark.parametrize(
    ("variant", "changes", "named"),
    [
        (
            SMOLVLM,
            {"more": {"clip.projector_type": "pixtral"}},
            "'pixtral' is not .*known: qwen2.5",
        ),
        (SMOLVLM, {"more": {"clip.projector_type": "gemma3"}}, "belongs to Gemma3ForCausalLM"),
        (SMOLVLM, {"more": {"clip.vision.projection_dim": 48}}, "projection_dim=48 and .* differ"),
        (SMOLVLM, {"more": {"clip.vision.image_size": 40}}, "position_embd.weight has 100 rows"),
        (SMOLVLM, {"without": {"clip.vision.block_count"}}, "block_count is None"),
        (SMOLVLM, {"without": {"clip.vision.image_std"}}, "image_std is .*three numbers"),
        (SMOLVLM, {"without": {"v.blk.1.ffn_up.bias"}}, "v.blk.1.ffn_up.bias is missing"),
        (SMOLVLM, {"without": {"mm.model.fc.weight"}}, "mm.model.fc.weight is missing"),
        (QWEN, {"without": {"v.patch_embd.weight.1"}}, "v.patch_embd.weight.1 is missing"),
        (QWEN, {"without": {"v.deepstack.1.fc1.bias"}}, "v.deepstack.1.fc1.bias is missing"),
        (QWEN, {"without": {"v.position_embd.weight"}}, "v.position_embd.weight is missing"),
        ("qwen2_5_vl", {"without": {"clip.vision.n_wa_pattern"}}, "n_wa_pattern is None"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, variant: str, changes: dict[str, Any], named: str
) -> None:
    text, mmproj = tmp_path / "model.gguf", tmp_path / "encoder.gguf"
    Mmproj(variant, text=TOKENIZER, **changes).write(text, mmproj)
    with pytest.raises(StartupError, match=rf"encoder\.gguf: .*{named}"):
        check_checkpoint(text, 0, mmproj)


def test_whole_files_are_accepted_and_damaged_ones_refused(tmp_path: Path) -> None:
    text, mmproj = tmp_path / "model.gguf", tmp_path / "encoder.gguf"
    Mmproj(QWEN, text=TOKENIZER).write(text, mmproj)
    assert check_checkpoint(text, 0, mmproj) == {}
    mmproj.write_bytes(mmproj.read_bytes()[:-4])
    with pytest.raises(StartupError, match=r"encoder\.gguf is not a complete GGUF file"):
        check_checkpoint(text, 0, mmproj)
    with pytest.raises(StartupError, match=r"model\.gguf: general\.architecture is 'qwen3vl'"):
        check_checkpoint(text, 0, text)


def test_the_setting_is_checked_before_a_worker_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    text, mmproj = tmp_path / "model.gguf", tmp_path / "encoder.gguf"
    Mmproj(SMOLVLM, text=TOKENIZER).write(text, mmproj)
    for model, given, named in (
        (mmproj, "", "this is an image encoder: .*--mmproj"),
        (text, str(tmp_path), "has no config.json"),
        (text, str(text), "'llama'; an image encoder"),
        ("builtin", str(mmproj), "--mmproj .* is for models in GGUF files"),
    ):
        settings = load({"model": str(model), "mmproj": given})
        with pytest.raises(StartupError, match=named):
            model_checks.check_local_model(settings)
    model_checks.check_local_model(load({"model": str(text), "mmproj": str(mmproj)}))
    off = load({"model": str(text), "mmproj": "off"})
    assert model_checks.projector_file(off, text) is None
    mmproj.rename(tmp_path / "mmproj.gguf")
    for task, found in (("generate", tmp_path / "mmproj.gguf"), ("embed", None)):
        settings = load({"model": str(text), "task": task})
        assert model_checks.projector_file(settings, text) == found
